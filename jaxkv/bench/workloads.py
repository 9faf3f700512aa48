"""Workloads as plain data: the same prompts and output lengths for every engine that is compared.

`STANDARD` holds the four that peers were measured on; they are the benchmarks' defaults.

| name | requests | prompt tokens | output tokens | asks for |
|---|---|---|---|---|
| W1 | 1 | 128 | 128 | one stream |
| W2 | 16 at once | 256 | 128 | a full batch of equals |
| W3 | 16 at once | 1024 shared + 32 own | 32 | prefix reuse |
| W4 | 48 at once | sum 10,337, median 168, max 768 | sum 6,214, median 114, max 256 | unequal lengths |

W4's lengths are log-normal. Token ids are random: nothing here depends on what the text says, and every engine ignores EOS.
Only `random.Random.random` is used, whose stream Python promises to keep, so the data are the same on every version.
"""

import dataclasses
import json
import math
import random
import statistics
from collections.abc import Callable

FIRST_ID, END_ID = 100, 30_000  # ids below may be special tokens, ids above lie outside small vocabularies
_SIGMA = 0.8  # of the logarithm of W4's lengths, as in conversations
_W4_SEED = 1741  # with it the sums come near those of the table in which the peers were first measured


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests that all arrive at once."""

    name: str
    prompts: tuple[tuple[int, ...], ...]  # token ids, one tuple a request
    output_lens: tuple[int, ...]  # tokens to generate, EOS ignored

    def __post_init__(self) -> None:
        assert len(self.prompts) == len(self.output_lens)

    @classmethod
    def from_json(cls, text: str) -> "Workload":
        fields = json.loads(text)
        prompts = tuple(tuple(prompt) for prompt in fields["prompts"])
        return cls(name=fields["name"], prompts=prompts, output_lens=tuple(fields["output_lens"]))

    def to_json(self) -> str:
        """For engines in other processes."""
        return json.dumps(dataclasses.asdict(self))

    @property
    def num_requests(self) -> int:
        return len(self.prompts)

    @property
    def prompt_lens(self) -> tuple[int, ...]:
        """Tokens in each prompt."""
        return tuple(len(prompt) for prompt in self.prompts)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(self.prompt_lens)

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)

    @property
    def is_uniform(self) -> bool:
        """Whether all prompts and all outputs have one length, so that a static batch wastes nothing."""
        return len(set(self.prompt_lens)) == 1 and len(set(self.output_lens)) == 1


def lognormal_lens(rng: random.Random, num: int, *, median: float, sigma: float, low: int, high: int) -> list[int]:
    """Draws `num` lengths in tokens, log-normal about `median`, clipped to [low, high]."""
    normal = statistics.NormalDist()
    draws = [median * math.exp(sigma * normal.inv_cdf(max(rng.random(), 1e-12))) for _ in range(num)]
    return [min(high, max(low, round(draw))) for draw in draws]


def random_ids(rng: random.Random, num: int) -> tuple[int, ...]:
    """Draws `num` token ids in [FIRST_ID, END_ID)."""
    return tuple(FIRST_ID + int(rng.random() * (END_ID - FIRST_ID)) for _ in range(num))


def equal(name: str, num_requests: int, prompt_len: int, output_len: int) -> Workload:
    """Requests of one shape."""
    rng = random.Random(num_requests)
    prompts = tuple(random_ids(rng, prompt_len) for _ in range(num_requests))
    return Workload(name=name, prompts=prompts, output_lens=(output_len,) * num_requests)


def shared_prefix(num_requests: int, shared_len: int, own_len: int, output_len: int) -> Workload:
    """Requests whose prompts begin with the same `shared_len` tokens."""
    rng = random.Random(3)
    shared = random_ids(rng, shared_len)
    prompts = tuple(shared + random_ids(rng, own_len) for _ in range(num_requests))
    return Workload(name="prefix", prompts=prompts, output_lens=(output_len,) * num_requests)


def mix(num_requests: int) -> Workload:
    """Requests of log-normal lengths."""
    rng = random.Random(4)
    prompt_lens, output_lens = zip(*mix_lens(num_requests), strict=True)
    prompts = tuple(random_ids(rng, length) for length in prompt_lens)
    return Workload(name="mix", prompts=prompts, output_lens=output_lens)


def mix_lens(num: int = 48) -> list[tuple[int, int]]:
    """(prompt tokens, output tokens) of `num` requests."""
    rng = random.Random(_W4_SEED)
    prompt_lens = lognormal_lens(rng, num, median=168, sigma=_SIGMA, low=4, high=768)
    output_lens = lognormal_lens(rng, num, median=118, sigma=_SIGMA, low=4, high=256)
    return list(zip(prompt_lens, output_lens, strict=True))


STANDARD: dict[str, Callable[[], Workload]] = {
    "W1": lambda: equal("W1", 1, 128, 128),
    "W2": lambda: equal("W2", 16, 256, 128),
    "W3": lambda: shared_prefix(16, 1024, 32, 32),
    "W4": lambda: mix(48),
}

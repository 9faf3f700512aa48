"""Traces: who asks what after what, as plain data, for prefix caches.

    shared     one system prompt; between its users come others, who share nothing
    chat       conversations that take turns; each turn's prompt is all that was said before
    agents     a tree: an agent hands its context to sub-agents, and these to theirs
    few-shot   an evaluation: each task has its examples in front of every question; questions of all tasks come mixed

A trace is a sequence of rounds: the requests of one come together, the next one begins when all are answered. Answers
are written into the traces, so that prompts depend on the seed only, not on what a model says. What `keep` marks are
the breakpoints a careful caller would set.
"""

import dataclasses
import random
from collections.abc import Callable, Iterator

from jaxkv.bench.workloads import Workload, random_ids


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceRequest:
    """One request."""

    prompt: tuple[int, ...]  # token ids
    output_len: int = 4  # tokens to generate
    keep: tuple[int, ...] = ()  # breakpoints, in tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """Requests by round."""

    name: str
    rounds: tuple[tuple[TraceRequest, ...], ...]

    @property
    def requests(self) -> Iterator[TraceRequest]:
        """All of them, in order."""
        return (request for each in self.rounds for request in each)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)

    def best_hits(self, page_size: int) -> int:
        """Prompt tokens that a cache which forgets nothing finds: each page is computed once.

        In whatever order requests come: with room for everything, depth first is no better than any other order.
        """
        known: dict[tuple[int, ...], None] = {}
        hits = 0
        for request in self.requests:
            prompt = request.prompt
            ends = range(page_size, len(prompt) + 1, page_size)
            found = next((end - page_size for end in ends if prompt[:end] not in known), len(prompt))
            hits += min(found, (len(prompt) - 1) // page_size * page_size)
            known |= {prompt[:end]: None for end in ends}
        return hits

    def num_pages(self, page_size: int) -> int:
        """Pages that all prompts together fill, equal ones once."""
        prompts = [request.prompt for request in self.requests]
        return len({prompt[:end] for prompt in prompts for end in range(page_size, len(prompt) + 1, page_size)})

    def most_pages(self, page_size: int) -> int:
        """Pages of the longest request."""
        return max(-(-(len(request.prompt) + request.output_len) // page_size) for request in self.requests)


def shared(
    seed: int = 1,
    *,
    system: int = 256,
    own: int = 24,
    users: int = 3,
    visits: int = 3,
    others: int = 8,
    other: int = 96,
) -> Trace:
    """Lengths in tokens; `users` come together, `visits` times, with `others` in rounds of four in between."""
    rng = random.Random(seed)
    head = random_ids(rng, system)
    rounds = []
    for _ in range(visits):
        rounds += [
            [TraceRequest(prompt=random_ids(rng, other)) for _ in range(4)] for _ in range(others // 4) if rounds
        ]
        rounds.append([TraceRequest(prompt=head + random_ids(rng, own), keep=(system,)) for _ in range(users)])
    return _trace("shared", rounds)


def chat(
    seed: int = 2, *, system: int = 48, conversations: int = 4, turns: int = 4, user: int = 32, answer: int = 32
) -> Trace:
    """Lengths in tokens; each round is one turn of two conversations."""
    rng = random.Random(seed)
    said = [random_ids(rng, system)] * conversations
    rounds = []
    for _ in range(turns):
        for first in range(0, conversations, 2):
            asked = []
            for number in range(first, min(first + 2, conversations)):
                prompt = said[number] + random_ids(rng, user)
                asked.append(TraceRequest(prompt=prompt, keep=(system, len(prompt))))
                said[number] = prompt + random_ids(rng, answer)
            rounds.append(asked)
    return _trace("chat", rounds)


def agents(seed: int = 3, *, root: int = 128, middle: int = 64, leaf: int = 48, width: int = 3) -> Trace:
    """Tokens that each level adds; `width` sub-agents of each, the sub-agents of all take turns."""
    rng = random.Random(seed)
    head = random_ids(rng, root)
    contexts = [head + random_ids(rng, middle) for _ in range(width)]
    rounds = [[TraceRequest(prompt=context, keep=(root, root + middle)) for context in contexts]]
    for _ in range(width):
        leaves = [context + random_ids(rng, leaf) for context in contexts]
        rounds.append([TraceRequest(prompt=prompt, keep=(root, root + middle)) for prompt in leaves])
    return _trace("agents", rounds)


def few_shot(seed: int = 4, *, tasks: int = 3, examples: int = 192, questions: int = 6, own: int = 16) -> Trace:
    """Lengths in tokens; all come at once, the tasks mixed."""
    rng = random.Random(seed)
    heads = [random_ids(rng, examples) for _ in range(tasks)]
    asked = [
        TraceRequest(prompt=head + random_ids(rng, own), keep=(examples,)) for _ in range(questions) for head in heads
    ]
    return _trace("few-shot", [asked])


def workload(traces: list[Trace]) -> Workload:
    """The same requests without their order, for the conditions of a result."""
    requests = [request for trace in traces for request in trace.requests]
    return Workload(
        name="prefix",
        prompts=tuple(request.prompt for request in requests),
        output_lens=tuple(request.output_len for request in requests),
    )


def _trace(name: str, rounds: list[list[TraceRequest]]) -> Trace:
    return Trace(name=name, rounds=tuple(tuple(each) for each in rounds if each))


TRACES: dict[str, Callable[[], Trace]] = {"shared": shared, "chat": chat, "agents": agents, "few-shot": few_shot}

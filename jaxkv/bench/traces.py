"""Traces: who asks what after what, as plain data, for prefix caches.

    shared     one system prompt; between its users come others, who share nothing
    chat       conversations; each turn's prompt is all that was said before
    agents     a tree: an agent hands its context to one sub-agent after another
    few-shot   an evaluation: each task has its examples in front of every question; questions of all tasks come mixed

A request names those that must be answered before it comes: a turn the turn before, a sub-agent the one before it, a user
of the system prompt all who were there before. `arrivals` plays that. Answers are written into the traces, so that prompts
depend on the seed only, not on what a model says. What `keep` marks are the breakpoints a careful caller would set.
"""

import dataclasses
import random
from collections.abc import Callable

from jaxkv.bench.workloads import Workload, random_ids


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceRequest:
    """One request."""

    prompt: tuple[int, ...]  # token ids
    output_len: int = 4  # tokens to generate
    keep: tuple[int, ...] = ()  # breakpoints, in tokens
    after: tuple[int, ...] = ()  # earlier requests of the trace, by index, that are answered before it comes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """Requests, none before those that it follows."""

    name: str
    requests: tuple[TraceRequest, ...]

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
        """Pages of the longest request, prompt and output."""
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
    """Lengths in tokens; `users` come together, `visits` times, with `others` by fours in between."""
    rng = random.Random(seed)
    head = random_ids(rng, system)
    requests: list[TraceRequest] = []
    before: tuple[int, ...] = ()

    def come(prompts: list[tuple[int, ...]], keep: tuple[int, ...] = ()) -> None:
        nonlocal before
        start = len(requests)
        requests.extend(TraceRequest(prompt=prompt, keep=keep, after=before) for prompt in prompts)
        before = tuple(range(start, len(requests)))

    for _ in range(visits):
        for _ in range(others // 4 if requests else 0):
            come([random_ids(rng, other) for _ in range(4)])
        come([head + random_ids(rng, own) for _ in range(users)], keep=(system,))
    return Trace(name="shared", requests=tuple(requests))


def chat(
    seed: int = 2, *, system: int = 48, conversations: int = 6, turns: int = 4, user: int = 32, answer: int = 32
) -> Trace:
    """Lengths in tokens; turn by turn, all conversations in each."""
    rng = random.Random(seed)
    said = [random_ids(rng, system)] * conversations
    requests: list[TraceRequest] = []
    for turn in range(turns):
        for number in range(conversations):
            prompt = said[number] + random_ids(rng, user)
            after = (len(requests) - conversations,) if turn else ()
            requests.append(TraceRequest(prompt=prompt, keep=(system, len(prompt)), after=after))
            said[number] = prompt + random_ids(rng, answer)
    return Trace(name="chat", requests=tuple(requests))


def agents(seed: int = 3, *, root: int = 128, middle: int = 64, leaf: int = 48, width: int = 4) -> Trace:
    """Tokens that each level adds; `width` agents, and `width` sub-agents of each, one after the other."""
    rng = random.Random(seed)
    head = random_ids(rng, root)
    contexts = [head + random_ids(rng, middle) for _ in range(width)]
    keep = (root, root + middle)
    requests = [TraceRequest(prompt=context, keep=keep) for context in contexts]
    for _ in range(width):
        requests += [
            TraceRequest(prompt=context + random_ids(rng, leaf), keep=keep, after=(len(requests) - width + agent,))
            for agent, context in enumerate(contexts)
        ]
    return Trace(name="agents", requests=tuple(requests))


def few_shot(seed: int = 4, *, tasks: int = 4, examples: int = 192, questions: int = 6, own: int = 16) -> Trace:
    """Lengths in tokens; all come at once, the tasks mixed."""
    rng = random.Random(seed)
    heads = [random_ids(rng, examples) for _ in range(tasks)]
    requests = [
        TraceRequest(prompt=head + random_ids(rng, own), keep=(examples,)) for _ in range(questions) for head in heads
    ]
    return Trace(name="few-shot", requests=tuple(requests))


def workload(traces: list[Trace]) -> Workload:
    """The same requests without their order, for the conditions of a result."""
    requests = [request for trace in traces for request in trace.requests]
    return Workload(
        name="prefix",
        prompts=tuple(request.prompt for request in requests),
        output_lens=tuple(request.output_len for request in requests),
    )


TRACES: dict[str, Callable[[], Trace]] = {"shared": shared, "chat": chat, "agents": agents, "few-shot": few_shot}

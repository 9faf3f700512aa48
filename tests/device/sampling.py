"""What sampling must do, written slowly in float64, and the device's arrays for the same rows."""

import dataclasses
from typing import Any

import numpy as np

from jaxkv.device import row_state
from jaxkv.grammar_layout import GrammarPlace
from jaxkv.plan import RowSetup
from jaxkv.request import SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A row about to sample its next token."""

    params: SamplingParams
    prompt: tuple[int, ...] = (1, 2, 3)
    output: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    seed: int = 0
    child: int = 0
    grammar: GrammarPlace | None = None
    grammar_state: int = 0

    def setup(self, row: int) -> RowSetup:
        return RowSetup(
            row=row,
            params=self.params,
            seed=self.seed,
            child=self.child,
            prompt_len=len(self.prompt),
            max_total_len=len(self.prompt) + self.params.max_tokens,
            stop_ids=self.stop_ids,
            bad_words_ids=self.bad_words_ids,
            token_ids=np.array(self.prompt + self.output, np.int32),
            grammar=self.grammar,
            grammar_state=self.grammar_state,
        )


def row(prompt=(1, 2, 3), output=(), stop_ids=(), bad_words_ids=(), seed=0, child=0, **params: Any) -> Row:
    """A row whose other keywords are fields of `SamplingParams`."""
    return Row(
        params=SamplingParams(**({"max_tokens": 1000} | params)), prompt=tuple(prompt), output=tuple(output),
        stop_ids=tuple(stop_ids), bad_words_ids=tuple(bad_words_ids), seed=seed, child=child,
    )  # fmt: skip


def pack(rows: list[Row], vocab: int, size: int | None = None) -> dict[str, Any]:
    """Arguments of `sampler.sample` after the logits; entries beyond `rows` are not live."""
    size = size or len(rows)
    setups = [r.setup(i) for i, r in enumerate(rows)]
    params, recent, _ = row_state.pack_setups(setups, np.arange(len(rows)), size, vocab)
    position, live = np.zeros(size, np.int32), np.zeros(size, bool)
    counts = np.zeros((size + 1, vocab), np.uint16)
    for i, r in enumerate(rows):
        position[i], live[i] = len(r.prompt) + len(r.output), True
        counts[i] = np.bincount(r.output, minlength=vocab) if r.output else 0
        counts[i, list(r.prompt)] |= row_state.PROMPT_BIT
    return dict(
        params=params, position=position, counts=counts, rows=np.arange(size, dtype=np.int32), recent=recent, live=live
    )


def adjusted(logits: np.ndarray, r: Row) -> np.ndarray:
    """Masks, bias and penalties on `logits` float [V] -> float64 [V]."""
    p, x = r.params, logits.astype(np.float64)
    if p.allowed_token_ids is not None:
        x[[t for t in range(len(x)) if t not in p.allowed_token_ids]] = -np.inf
    forbidden = [w[-1] for w in r.bad_words_ids if len(w) - 1 <= len(r.output) and _ends_with(r.output, w[:-1])]
    x = _forbid(x, forbidden)
    if len(r.output) < p.min_tokens:
        x = _forbid(x, list(r.stop_ids))
    for token, bias in (p.logit_bias or {}).items():
        x[token] += bias
    for token in {*r.prompt, *r.output}:
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token in r.output:
        x[token] -= p.frequency_penalty
    for token in {*r.output}:
        x[token] -= p.presence_penalty
    return x


def _ends_with(output: tuple[int, ...], tail: tuple[int, ...]) -> bool:
    return output[len(output) - len(tail) :] == tail


def _forbid(x: np.ndarray, token_ids: list[int]) -> np.ndarray:
    forbidden = x.copy()
    forbidden[token_ids] = -np.inf
    return forbidden if np.isfinite(forbidden).any() else x


def probabilities(logits: np.ndarray, r: Row) -> np.ndarray:
    """The distribution of the next token, float64 [V]: tokens sorted, cut one criterion after the other."""
    p, x = r.params, adjusted(logits, r)
    if p.temperature == 0:
        return np.eye(len(x))[x.argmax()]
    scaled = (x - x.max()) / p.temperature
    order = np.argsort(-scaled, kind="stable")
    prob = np.exp(scaled[order])
    if p.top_k:
        prob[prob < prob[min(p.top_k, len(prob)) - 1]] = 0  # ties with the last one stay
    prob /= prob.sum()
    if p.top_p < 1:
        last = np.searchsorted(np.cumsum(prob), p.top_p)
        prob[prob < prob[min(last, len(prob) - 1)]] = 0
    prob[prob < p.min_p * prob.max()] = 0
    out = np.zeros(len(x))
    out[order] = prob / prob.sum()
    return out


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x.astype(np.float64) - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)

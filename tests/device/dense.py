"""The slow, obvious model: every step runs all tokens again, no pages, no rows, no batch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.device import sampler
from jaxkv.models.decoder import Decoder
from tests.device.sampling import Row, adjusted, pack


class Dense:
    """A model without a cache.

    Args:
        model: its weights.
        max_len: most tokens of a sequence.
    """

    def __init__(self, model: Decoder, max_len: int) -> None:
        self._max_len = max_len
        self._vocab = model.cfg.vocab_size
        self._logits: Any = jax.jit(lambda token_ids: _logits(model, token_ids))
        self._sample: Any = jax.jit(sampler.sample)
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    def logits(self, token_ids: tuple[int, ...]) -> np.ndarray:
        """float32 [len, V]: after each of the tokens."""
        if token_ids not in self._known:
            padded = np.zeros(self._max_len, np.int32)
            padded[: len(token_ids)] = token_ids
            self._known[token_ids] = np.asarray(self._logits(padded))[: len(token_ids)]
        return self._known[token_ids]

    def logprobs(self, token_ids: tuple[int, ...]) -> np.ndarray:
        """float64 [len, V]."""
        logits = self.logits(token_ids).astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

    def next_token(self, row: Row) -> int:
        """Greedy rows by the float64 reference; drawn ones by the sampler, alone."""
        logits = self.logits(row.prompt + row.output)[-1]
        if row.params.temperature == 0:
            return int(adjusted(logits, row).argmax())
        return int(self._sample(logits[None], **pack([row], self._vocab))[0])

    def generate(self, row: Row, max_len: int | None = None) -> tuple[int, ...]:
        """The whole output of `row`, a stop id included."""
        start, output = len(row.output), row.output
        max_total = min(len(row.prompt) + row.params.max_tokens, max_len or self._max_len)
        while len(row.prompt) + len(output) < max_total:
            token = self.next_token(Row(**{**vars(row), "output": output}))
            output = (*output, token)
            if token in row.stop_ids and len(output) > row.params.min_tokens:
                break
        return output[start:]


def _logits(model: Decoder, token_ids: jax.Array) -> jax.Array:
    query, key = jnp.arange(token_ids.shape[0])[:, None], jnp.arange(token_ids.shape[0])[None, :]

    def attend(layer, q, k, v, pool, *, scale, window, soft_cap):
        groups = q.shape[1] // k.shape[1]
        k, v = jnp.repeat(k, groups, axis=1), jnp.repeat(v, groups, axis=1)
        scores = jnp.einsum("qhd,khd->hqk", q, k, precision="highest") * scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        seen = (key <= query) & (key > query - (token_ids.shape[0] if window is None else window))
        weights = jax.nn.softmax(jnp.where(seen[None], scores, -jnp.inf), axis=-1)
        return jnp.einsum("hqk,khd->qhd", weights, v, precision="highest"), pool

    hidden, _ = model.hidden(token_ids, jnp.arange(token_ids.shape[0], dtype=jnp.int32), None, attend)
    return model.logits(hidden)

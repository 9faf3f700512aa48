"""Rotary position embedding: every rule by which checkpoints say their frequencies.

Axis letters: T tokens, D head dim, W rotated dims of a head (W <= D).

Frequencies are made on the host in float32, in the order of operations of transformers' `modeling_rope_utils`, because
at position 128k one unit in the last place of a frequency turns a head by 0.008 radians.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

Phases = tuple[jax.Array, jax.Array]  # cos, sin: float32 [T, 1, W / 2]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary embedding (arXiv:2104.09864), rotate-half layout. Kinds are Hugging Face's, and `factors`.

    | kind | frequencies |
    |---|---|
    | linear | divided by `factor` |
    | dynamic | of a base that grows with the position beyond `original_max_len` (NTK) |
    | yarn | divided by `factor` where they turn slowly (arXiv:2309.00071) |
    | llama3 | divided by `factor` beyond a wavelength, in between interpolated |
    | longrope | divided by `factors` one by one; by `long_factors` in an engine for more than `original_max_len` tokens |
    | factors | divided by `factors` one by one, as GGUF files carry them |
    """

    head_dim: int
    base: float = 10000.0
    width: int = 0  # dims of a head that are rotated, the first ones; 0: all
    kind: str = "default"  # default | linear | dynamic | yarn | llama3 | longrope | factors
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3 only
    high_freq_factor: float = 4.0  # llama3 only
    original_max_len: int = 8192  # dynamic, yarn, llama3, longrope: tokens of a sequence in training
    beta_fast: float = 32.0  # yarn only: turns within original_max_len from which on a frequency is kept
    beta_slow: float = 1.0  # yarn only: and up to which it is divided
    truncate: bool = True  # yarn only: these borders lie at whole dims
    factors: tuple[float, ...] = ()  # factors, longrope: W / 2 numbers
    long_factors: tuple[float, ...] = ()  # longrope only: W / 2 numbers
    attention_factor: float = 1.0  # yarn, longrope: cos and sin are multiplied by it

    @property
    def num_rotated(self) -> int:
        """W."""
        return self.width or self.head_dim

    def for_len(self, max_len: int) -> "Rope":
        """The rule in an engine for sequences of up to `max_len` tokens.

        Longrope models have two sets of frequencies, one for short sequences and one for long ones. Keys of a cache that
        requests share can have only one, so all sequences of an engine use that of its longest.
        """
        if self.kind == "longrope" and max_len > self.original_max_len:
            return dataclasses.replace(self, factors=self.long_factors)
        return self

    @staticmethod
    def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
        """What the paper gives for a stretch by `factor`."""
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    @staticmethod
    def longrope_attention_factor(factor: float, original_max_len: int) -> float:
        """What the paper (arXiv:2402.13753) gives for a stretch by `factor`."""
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_max_len))

    def inv_freq(self) -> np.ndarray:
        """float32 [W / 2], radians per position; of kind dynamic: up to `original_max_len`."""
        powers = self._powers()
        freq = np.float32(1.0) / powers
        if self.kind == "linear":
            return freq / np.float32(self.factor)
        if self.kind in ("factors", "longrope"):
            return np.float32(1.0) / (np.asarray(self.factors, np.float32) * powers)
        if self.kind == "yarn":
            keep = self._yarn_keeps()
            return np.float32(1.0) / (np.float32(self.factor) * powers) * (1 - keep) + freq * keep
        if self.kind == "llama3":
            wavelen = np.float32(2 * math.pi) / freq
            low, high = self.original_max_len / self.low_freq_factor, self.original_max_len / self.high_freq_factor
            smooth = (np.float32(self.original_max_len) / wavelen - np.float32(self.low_freq_factor)) / np.float32(
                self.high_freq_factor - self.low_freq_factor
            )
            slow = freq / np.float32(self.factor)
            middle = (1 - smooth) * slow + smooth * freq
            return np.where(wavelen > low, slow, np.where(wavelen < high, freq, middle))
        return freq

    def phases(self, positions: jax.Array) -> Phases:
        """cos, sin for int32 positions [T]; float32 keeps 128k positions apart."""
        position = positions.astype(jnp.float32)[:, None]
        freq = jnp.asarray(self.inv_freq())[None, :]
        if self.kind == "dynamic":
            freq = freq * self._growth(position)
        angle = position * freq
        by = jnp.float32(self.attention_factor)
        return (jnp.cos(angle) * by)[:, None, :], (jnp.sin(angle) * by)[:, None, :]

    def _powers(self) -> np.ndarray:
        exponent = np.arange(0, self.num_rotated, 2, dtype=np.float32) / np.float32(self.num_rotated)
        return np.float32(self.base) ** exponent

    def _growth(self, position: jax.Array) -> jax.Array:
        """[T, W / 2]: what the frequencies of a position are multiplied by.

        Each token is turned as the last one of its sequence so far, which is what transformers does token by token. (A
        prompt beyond `original_max_len` is turned there by the base of its length instead, so that what a key is depends
        on what came with it; shared pages cannot have that.)
        """
        width, factor = self.num_rotated, self.factor
        length = jnp.maximum(position + 1.0, float(self.original_max_len))
        growth = (factor * length / self.original_max_len - (factor - 1)) ** (width / (width - 2))
        exponent = jnp.arange(0, width, 2, dtype=jnp.float32)[None, :] / width
        return jnp.exp(-exponent * jnp.log(growth))

    def _yarn_keeps(self) -> np.ndarray:
        """float32 [W / 2]: 1 where a frequency is kept, 0 where it is divided by `factor`."""
        width = self.num_rotated

        def dim(turns: float) -> float:
            return width * math.log(self.original_max_len / (turns * 2 * math.pi)) / (2 * math.log(self.base))

        low, high = dim(self.beta_fast), dim(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        if low == high:
            high += 0.001
        ramp = (np.arange(width // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
        return 1 - np.clip(ramp, 0, 1)


def phases_of_all(ropes: Sequence[Rope | None], positions: jax.Array) -> Phases:
    """The phases of several ropes, stacked on a leading axis; None turns nothing: cos is 1 and sin 0."""
    made = [rope.phases(positions) for rope in ropes if rope is not None]
    still = None
    if None in ropes:
        shape = made[0][0].shape if made else (positions.shape[0], 1, 1)
        still = (jnp.ones(shape, jnp.float32), jnp.zeros(shape, jnp.float32))
    rest = iter(made)
    all_phases = [still if rope is None else next(rest) for rope in ropes]
    cos, sin = zip(*(phases for phases in all_phases if phases is not None), strict=True)
    return jnp.stack(cos), jnp.stack(sin)


def rotate(x: jax.Array, phases: Phases) -> jax.Array:
    """Rotate the first W dims of `x [T, heads, D]` by `phases` from `Rope.phases`, in float32."""
    cos, sin = phases
    turned, rest = x[..., : 2 * cos.shape[-1]], x[..., 2 * cos.shape[-1] :]
    lo, hi = jnp.split(turned.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([lo * cos - hi * sin, hi * cos + lo * sin], axis=-1).astype(x.dtype)
    return jnp.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned

"""What every family's geometry is made of.

Axis letters: T tokens, L layers, E embed, H query heads, K KV heads, D head dim, F ffn, V vocabulary, X experts.
"""

import dataclasses
from collections.abc import Sequence

from jaxkv.models.rope import Rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerKind:
    """How the attention of a layer differs from that of its neighbours."""

    rope: Rope | None  # None: queries and keys are not rotated
    window: int | None = None  # a token at position i sees keys at positions in (i - window, i]; None: all up to i


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts instead of one MLP."""

    num: int  # X
    per_token: int  # the likeliest of them compute a token
    normalise: bool  # the weights of a token's experts add up to one


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Geometry of a decoder; what it does with it is `models.decoder`."""

    num_layers: int
    embed: int
    num_heads: int
    num_kv_heads: int  # as computed with, copies included
    head_dim: int
    ffn: int  # of one expert, where there are experts
    vocab_size: int
    max_len: int  # positions the model was trained for
    norm_eps: float
    kinds: tuple[LayerKind, ...]  # layer l is of kind l modulo their number
    tied: bool  # the head is the embedding
    experts: Experts | None = None
    activation: str = "silu"  # of the gate: silu | gelu_tanh
    qkv_bias: bool = False
    out_bias: bool = False  # of the attention's output
    mlp_bias: bool = False
    qk_norm: str = "none"  # none | head: over each head's D | width: over all heads
    qkv_clip: float | None = None  # queries, keys and values are held within +- this
    pre_norm: bool = True  # norms before attention and MLP
    post_norm: bool = False  # norms after them, before the residual is added
    norm_plus_one: bool = False  # norms multiply by 1 + weight
    query_scale: float | None = None  # scores are `q . k` times this; None: 1 / sqrt(D)
    soft_cap: float | None = None  # scores become cap * tanh(score / cap)
    embed_scale: float = 1.0  # embeddings are multiplied by it
    residual_scale: float = 1.0  # what is added to the residual is multiplied by it
    logit_scale: float = 1.0  # logits are divided by it
    logit_cap: float | None = None  # logits become cap * tanh(logit / cap)
    kv_copies: int = 1  # times each KV head of the checkpoint is there, see `kv_heads`

    @property
    def as_stored(self) -> "ModelConfig":
        """The geometry of the checkpoint."""
        return dataclasses.replace(self, num_kv_heads=self.num_kv_heads // self.kv_copies, kv_copies=1)

    @property
    def scale(self) -> float:
        """Of attention scores."""
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer."""
        return tuple(self.kinds[layer % len(self.kinds)].window for layer in range(self.num_layers))

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        """Of each layer."""
        return tuple(self.kinds[layer % len(self.kinds)].rope for layer in range(self.num_layers))

    def for_len(self, max_len: int | None) -> "ModelConfig":
        """The geometry in an engine for sequences of up to `max_len` tokens; None: as many as suit the model.

        Longrope models compute short sequences as they were trained to only in an engine for short ones (`Rope.for_len`),
        which is therefore what None means for them.
        """
        lens = [rope.original_max_len for rope in self.ropes if rope is not None and rope.kind == "longrope"]
        short = min(lens, default=self.max_len)
        if lens and (max_len is None or max_len <= short):
            return dataclasses.replace(self, max_len=min(self.max_len, short))
        turned = (kind.rope and kind.rope.for_len(max_len or self.max_len) for kind in self.kinds)
        kinds = tuple(dataclasses.replace(kind, rope=rope) for kind, rope in zip(self.kinds, turned, strict=True))
        return dataclasses.replace(self, kinds=kinds)


def repeating(kinds: Sequence[LayerKind]) -> tuple[LayerKind, ...]:
    """The shortest pattern whose repetition, cut off at the end, is `kinds`."""
    for period in range(1, len(kinds)):
        if all(kind == kinds[layer % period] for layer, kind in enumerate(kinds)):
            return tuple(kinds[:period])
    return tuple(kinds)

"""What a model's step needs at the least, by arithmetic: bytes and FLOPs of one device.

A decode step of R rows reads every weight once (of the embedding R rows only), reads the K/V of all rows' tokens, and
writes R rows of float32 logits. It multiplies and adds once per weight and row, and twice per number of K and V and
query head of their group.

Axis letters: R rows, E embed, H query heads, K KV heads, D head dim, F ffn, L layers, V vocabulary.
"""

import dataclasses

from jaxkv.capacity.chips import Chip
from jaxkv.errors import ConfigError
from jaxkv.models.config import ModelConfig
from jaxkv.models.kv_heads import copy_kv_heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Of one pass on one device."""

    weight_bytes: float
    kv_bytes: float
    logit_bytes: float
    flops: float
    link_bytes: float  # sent by each device

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes + self.logit_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """A model over a mesh."""

    cfg: ModelConfig  # with copies of KV heads where `tensor` exceeds their number
    tensor: int
    data: int
    dtype_bytes: int
    kv_dtype_bytes: int

    def with_tensor(self, tensor: int) -> "Layout":
        """The same model over another number of devices.

        Raises:
            ConfigError: the heads cannot be split like that.
        """
        return dataclasses.replace(self, cfg=copy_kv_heads(self.cfg.as_stored, tensor), tensor=tensor)

    @property
    def token_bytes(self) -> int:
        """Bytes of K/V of one token on one of its devices."""
        c = self.cfg
        return 2 * c.num_layers * (c.num_kv_heads // self.tensor) * c.head_dim * self.kv_dtype_bytes

    @property
    def layer_weights(self) -> int:
        """Numbers in a layer's matrices."""
        c = self.cfg
        attention = c.embed * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
        return attention + 3 * c.embed * c.ffn

    @property
    def num_weights(self) -> int:
        """Numbers in all matrices and norms."""
        c = self.cfg
        tables = (1 if c.tied else 2) * c.vocab_size * c.embed
        return c.num_layers * (self.layer_weights + 2 * c.embed) + tables + c.embed

    @property
    def weight_bytes(self) -> int:
        """On one device."""
        c = self.cfg
        split = c.num_layers * self.layer_weights + (1 if c.tied else 2) * c.vocab_size * c.embed
        return (split // self.tensor + (2 * c.num_layers + 1) * c.embed) * self.dtype_bytes

    def copied_bytes(self, chip: Chip) -> int:
        """Weights of one device that its compiler is known to copy in a step."""
        return self.weight_bytes if chip.copies_weights else 0

    def decode(self, rows: int, context_len: int) -> Work:
        """One token for each of `rows` rows (over all devices) that hold `context_len` tokens."""
        c, here = self.cfg, -(-rows // self.data)
        table = c.vocab_size * c.embed // self.tensor
        weights = self.weight_bytes - (0 if c.tied else (table - here * c.embed) * self.dtype_bytes)
        products = 2 * here * (c.num_layers * self.layer_weights + c.vocab_size * c.embed) / self.tensor
        attention = 4 * here * context_len * c.num_heads * c.head_dim * c.num_layers / self.tensor
        return Work(
            weight_bytes=weights,
            kv_bytes=here * context_len * self.token_bytes,
            logit_bytes=here * c.vocab_size * 4 / self.tensor,
            flops=products + attention,
            link_bytes=self._link_bytes(here),
        )

    def _link_bytes(self, rows: int) -> float:
        """Two ring all-reduces of `[rows, E]` in each layer: each device sends 2 (n - 1) / n of it."""
        share = 2 * (self.tensor - 1) / self.tensor
        return 2 * self.cfg.num_layers * rows * self.cfg.embed * self.dtype_bytes * share


def tensor_sizes(cfg: ModelConfig, most: int) -> list[int]:
    """Numbers of devices, up to `most`, over which the model can be split."""
    sizes = []
    for tensor in range(1, most + 1):
        try:
            copy_kv_heads(cfg.as_stored, tensor)
        except ConfigError:
            continue
        if cfg.ffn % tensor == 0 and cfg.vocab_size % tensor == 0:
            sizes.append(tensor)
    return sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bound:
    """The least time of a pass, and why."""

    memory_s: float
    compute_s: float
    link_s: float  # bandwidth alone; latency of small messages is not in it

    @property
    def step_s(self) -> float:
        return max(self.memory_s, self.compute_s, self.link_s)

    @property
    def rules(self) -> str:
        """What the step waits for: memory, compute or links."""
        times = {"memory": self.memory_s, "compute": self.compute_s, "links": self.link_s}
        return max(times, key=lambda name: times[name])


def bound(work: Work, chip: Chip, dtype_bytes: int) -> Bound:
    """Rooflines of a chip (Williams, Waterman, Patterson, 2009). float32 products count as 6 passes in bf16."""
    flops_s = chip.bf16_flops / (1 if dtype_bytes <= 2 else 6)
    return Bound(
        memory_s=work.bytes / chip.hbm_bytes_s,
        compute_s=work.flops / flops_s,
        link_s=work.link_bytes / chip.link_bytes_s,
    )

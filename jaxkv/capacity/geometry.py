"""What a model's step needs at the least, by arithmetic: bytes and FLOPs of one device.

A decode step of R rows reads every weight once (of the embedding R rows only, and of experts those that a row chose),
reads the K/V of all rows' tokens within the windows, and
writes R rows of float32 logits. It multiplies and adds once per weight and row, and twice per number of K and V and
query head of their group.

Axis letters: R rows, E embed, H query heads, K KV heads, D head dim, F ffn, L layers, V vocabulary.
"""

import dataclasses

from jaxkv.capacity.chips import Chip
from jaxkv.errors import ConfigError
from jaxkv.models.config import ModelConfig
from jaxkv.models.groups import LayerGroups
from jaxkv.models.kv_heads import copy_kv_heads
from jaxkv.models.quant import SCALE_BYTES
from jaxkv.paging import Paging


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
    quant: str | None = None  # of matrices, see `models.quant`
    groups: LayerGroups | None = None  # that share pages; None: all layers are one

    def with_tensor(self, tensor: int) -> "Layout":
        """The same model over another number of devices.

        Raises:
            ConfigError: the heads cannot be split like that.
        """
        return dataclasses.replace(self, cfg=copy_kv_heads(self.cfg.as_stored, tensor), tensor=tensor)

    @property
    def token_bytes(self) -> int:
        """Bytes of K/V of one token on one of its devices, in all layers."""
        c = self.cfg
        return 2 * c.num_layers * (c.num_kv_heads // self.tensor) * c.head_dim * self.kv_dtype_bytes

    def page_bytes(self, page_size: int) -> int:
        """Bytes of a page on one of its devices: of the layers of one group."""
        num_layers = self.cfg.num_layers if self.groups is None else self.groups.size
        return self.token_bytes * page_size * num_layers // self.cfg.num_layers

    def paging(self, page_size: int, token_budget: int = 0) -> Paging:
        """How many pages rows take."""
        windows = (None,) if self.groups is None else self.groups.windows
        return Paging(page_size=page_size, windows=windows, token_budget=token_budget)

    @property
    def _mlp_weights(self) -> int:
        """Numbers in the matrices of one MLP, which is one expert's where there are experts."""
        return 3 * self.cfg.embed * self.cfg.ffn

    @property
    def _attention_weights(self) -> int:
        c = self.cfg
        return c.embed * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)

    @property
    def layer_weights(self) -> int:
        """Numbers in a layer's matrices."""
        return self._attention_weights + self._mlp_weights * (self.cfg.experts.num if self.cfg.experts else 1)

    @property
    def active_layer_weights(self) -> int:
        """Of these, the numbers that one token is multiplied by."""
        return self._attention_weights + self._mlp_weights * (self.cfg.experts.per_token if self.cfg.experts else 1)

    @property
    def _split_vectors(self) -> int:
        """Numbers of a layer that are no matrix and are split over devices."""
        c = self.cfg
        heads = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        norms = (c.num_heads + c.num_kv_heads) * c.head_dim if c.qk_norm == "width" else 0
        return heads * c.qkv_bias + norms + 2 * c.ffn * c.mlp_bias

    @property
    def _whole_vectors(self) -> int:
        """Numbers of a layer that each device has all of: norms, biases of outputs, the router."""
        c = self.cfg
        norms = 2 * c.embed * (c.pre_norm + c.post_norm) + (2 * c.head_dim if c.qk_norm == "head" else 0)
        return norms + c.embed * (c.out_bias + c.mlp_bias) + (c.experts.num * c.embed if c.experts else 0)

    @property
    def num_weights(self) -> int:
        """All numbers of the model."""
        c = self.cfg
        tables = (1 if c.tied else 2) * c.vocab_size * c.embed
        return c.num_layers * (self.layer_weights + self._split_vectors + self._whole_vectors) + tables + c.embed

    @property
    def num_active_weights(self) -> int:
        """Those that a token is computed with; an embedding table of its own is not."""
        c = self.cfg
        return (
            self.num_weights
            - c.num_layers * (self.layer_weights - self.active_layer_weights)
            - (0 if c.tied else c.vocab_size * c.embed)
        )

    def _matrix_bytes(self, num_weights: float, num_channels: int) -> float:
        """Of matrices with so many numbers and output channels."""
        return num_weights * self.dtype_bytes if self.quant is None else num_weights + num_channels * SCALE_BYTES

    @property
    def _mlp_channels(self) -> int:
        """Output channels of one MLP."""
        return 2 * self.cfg.ffn + self.cfg.embed

    @property
    def weight_bytes(self) -> int:
        """On one device."""
        c, table = self.cfg, self.cfg.vocab_size * self.cfg.embed
        heads = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        # Where inputs are split, and not channels, each device has the scales of all channels.
        split_channels = heads + (c.experts.num * self._mlp_channels if c.experts else 2 * c.ffn)
        whole_channels = c.embed if c.experts else 2 * c.embed
        matrices = self._matrix_bytes(c.num_layers * self.layer_weights, c.num_layers * split_channels)
        head = 0 if c.tied else self._matrix_bytes(table, c.vocab_size)
        vectors = c.num_layers * self._split_vectors // self.tensor + c.num_layers * self._whole_vectors + c.embed
        return int(
            (matrices + head) // self.tensor
            + self._matrix_bytes(0, c.num_layers * whole_channels)
            + (table // self.tensor + vectors) * self.dtype_bytes
        )

    def _idle_expert_bytes(self, rows: int) -> float:
        """Of one device: experts that no row is expected to choose, if each is as likely as another."""
        c = self.cfg
        if c.experts is None:
            return 0.0
        idle = c.experts.num * (1 - c.experts.per_token / c.experts.num) ** rows
        return c.num_layers * idle * self._matrix_bytes(self._mlp_weights, self._mlp_channels) / self.tensor

    def copied_bytes(self, chip: Chip) -> int:
        """Weights of one device that its compiler is known to copy in a step."""
        # XLA copies a layer's gates and ups out of the stack for a ragged product: 224 of 227 MiB of temporaries of
        # Mixtral's decode step over 8 v6e (2.9 times the bytes that it must move).
        experts = 2 * self._mlp_weights // 3 * self.cfg.experts.num // self.tensor if self.cfg.experts else 0
        # Triton's products have a layer's int8 matrices copied out of the stack (`ops.GPU_QUANTISED_OPTIONS`).
        layer = self.layer_weights // self.tensor if self.quant and chip.platform == "gpu" else 0
        return experts * self.dtype_bytes + layer

    def decode(self, rows: int, context_len: int) -> Work:
        """One token for each of `rows` rows (over all devices) that hold `context_len` tokens."""
        c, here = self.cfg, -(-rows // self.data)
        table = c.vocab_size * c.embed // self.tensor
        weights = self.weight_bytes - (0 if c.tied else (table - here * c.embed) * self.dtype_bytes)
        products = 2 * here * (c.num_layers * self.active_layer_weights + c.vocab_size * c.embed) / self.tensor
        # Tokens whose K/V a row reads, over all layers.
        num_read = sum(context_len if window is None else min(context_len, window) for window in c.windows)
        attention = 4 * here * num_read * c.num_heads * c.head_dim / self.tensor
        return Work(
            weight_bytes=weights - self._idle_expert_bytes(here),
            kv_bytes=here * num_read * self.token_bytes / c.num_layers,
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
        split = cfg.experts.num if cfg.experts else cfg.ffn
        if split % tensor == 0 and cfg.vocab_size % tensor == 0:
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

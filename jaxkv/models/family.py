"""What makes a model family."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxkv.models.config import ModelConfig
from jaxkv.models.decoder import Decoder
from jaxkv.models.kv_heads import COPY_HEADS
from jaxkv.models.quant import check_scheme, with_quantised_matrices
from jaxkv.models.weights import WeightMap


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One model file and what it takes to fill it."""

    name: str
    architectures: tuple[str, ...]  # values of config.json's `architectures`
    model_types: tuple[str, ...]  # values of config.json's `model_type`
    config_from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    weight_map: Callable[[ModelConfig], WeightMap]  # of the geometry as stored
    module: Callable[..., nnx.Module] = Decoder  # (cfg, dtype, per_layer=) -> module
    # (parameter as stored, copies) -> parameter, for those that change with `ModelConfig.kv_copies`, by path
    copy_heads: Mapping[str, Callable[[jax.Array, int], jax.Array]] = dataclasses.field(
        default_factory=lambda: COPY_HEADS, hash=False
    )
    # Changes with the source of `module`: names its compiled programs on disk. jaxkv's own source counts anyway.
    revision: str = ""

    def build(self, cfg: ModelConfig, dtype: np.dtype, *, per_layer: bool, quant: str | None = None) -> nnx.Module:
        """The module with `jax.ShapeDtypeStruct`s for parameters: nothing is allocated.

        Raises:
            ConfigError: `quant` is not a scheme of `models.quant`.
        """
        check_scheme(quant)
        module = nnx.eval_shape(lambda: self.module(cfg, dtype, per_layer=per_layer))
        return module if quant is None else with_quantised_matrices(module)

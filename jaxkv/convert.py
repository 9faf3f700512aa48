"""`jaxkv convert`: any model into a checkpoint that loads fast and holds all it takes to run."""

import os
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from jaxkv.catalog import open_model
from jaxkv.checkpoint.atomic import check_new
from jaxkv.checkpoint.load import load_model, model_config
from jaxkv.checkpoint.orbax import save_checkpoint
from jaxkv.checkpoint.source import ModelSource
from jaxkv.errors import ConfigError
from jaxkv.tokenizer import Tokenizer, load_tokenizer, save_tokenizer

DTYPES = ("auto", "float32", "bfloat16")


def convert(
    model: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    dtype: str = "auto",
    progress: bool | None = None,
) -> Path:
    """Writes a model as an Orbax checkpoint: weights, config, tokenizer and chat template in one folder.

    The weights pass through host memory, which has to hold them once in `dtype`. The folder appears complete or not
    at all.

    Args:
        model: whatever `catalog.open_model` takes.
        target: the folder to make; it must not exist.
        dtype: of the weights: "float32", "bfloat16", or "auto": float32 if the source stores most weights so, else
            bfloat16.
        progress: show a bar on stderr; None shows it on a terminal only.

    Returns:
        The folder.

    Raises:
        CheckpointError: the model cannot be read, or the folder exists or cannot be written.
        ConfigError: `dtype` is not one of these.
    """
    target = Path(target)
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r} must be one of {', '.join(DTYPES)}")
    check_new(target)  # before minutes of work
    source = open_model(model)
    family, cfg = model_config(source)
    tokenizer = _tokenizer(source)
    weights_dtype = source.auto_dtype if dtype == "auto" else jax.numpy.dtype(dtype)
    host = Mesh(np.asarray(jax.local_devices(backend="cpu")[:1]), ("tensor",))
    loaded = load_model(source, family, cfg, dtype=weights_dtype, mesh=host, per_layer=True, progress=progress)
    save_checkpoint(
        target,
        loaded,
        config=source.config,
        generation_config=source.generation_config,
        digest=f"{source.digest}-{weights_dtype}",
        save_tokenizer=None if tokenizer is None else lambda folder: save_tokenizer(tokenizer, folder),
    )
    return target


def _tokenizer(source: ModelSource) -> Tokenizer | None:
    if source.tokenizer_source is None:
        return None
    return load_tokenizer(source.tokenizer_source, generation_config=source.generation_config)

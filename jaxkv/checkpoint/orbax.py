"""jaxkv's own checkpoints: weights in Orbax, everything else beside them.

    config.json, generation_config.json    in Hugging Face's words
    tokenizer.json, ...                    what `load_tokenizer` reads
    jaxkv.json                             format, digest of the source
    params/                                Orbax tree: embed, layers/<number>/qkv, ...

Layers are stored one by one, so that a checkpoint fills stacked and per-layer models, on any mesh and in any dtype,
and each device reads what it holds. Chunks are not compressed: bf16 weights shrink by a quarter only, and zstd makes
saving and loading three times slower.
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

from jaxkv.checkpoint.atomic import new_folder
from jaxkv.checkpoint.pieces import Piece, check_shapes, is_stacked, piece_name
from jaxkv.checkpoint.source import CHECKPOINT_MARKER, read_json
from jaxkv.errors import CheckpointError, JaxkvError
from jaxkv.models.quant import is_quantised
from jaxkv.models.weights import WeightMap

_FORMAT = 2
_PARAMS = "params"
_CHUNK_BYTES = 32 << 20  # largest piece of a file that a shard has to read
_BATCH_BYTES = 32 << 20  # restored by one call; a call costs 30 ms whatever it reads


def save_checkpoint(
    target: Path,
    model: nnx.Module,
    *,
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None,
    digest: str,
    save_tokenizer: Callable[[Path], None] | None = None,
) -> None:
    """Writes a model and all it takes to run it into a new folder. It appears complete or not at all.

    Args:
        target: the folder; it must not exist.
        model: stacked or per-layer, on any mesh. The layers of a stacked model are copied to the host.
        config: in the words of Hugging Face's config.json.
        generation_config: in the words of generation_config.json.
        digest: names these weights, see `ModelSource.digest`.
        save_tokenizer: writes the tokenizer's files into the folder it is given.

    Raises:
        CheckpointError: the model is quantised, the folder exists, or writing failed; nothing is left behind.
    """
    tree = _tree(model, target)
    leaves = jax.tree.leaves(tree)
    need = sum(leaf.nbytes for leaf in leaves)
    with new_folder(target) as folder:
        free = shutil.disk_usage(folder).free
        if need > free:
            raise CheckpointError(f"{target}: the weights take {need} bytes, but the disk has {free} bytes free")
        try:
            _write_json(folder / "config.json", {**config, "dtype": str(leaves[0].dtype)})
            if generation_config is not None:
                _write_json(folder / "generation_config.json", generation_config)
            if save_tokenizer is not None:
                save_tokenizer(folder)
            args = jax.tree.map(lambda leaf: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), tree)
            with _checkpointer() as checkpointer:
                checkpointer.save((folder / _PARAMS).absolute(), args=ocp.args.PyTreeSave(tree, save_args=args))
            _write_json(folder / CHECKPOINT_MARKER, {"format": _FORMAT, "digest": digest})
        except JaxkvError:
            raise
        except Exception as error:  # TensorStore raises ValueError for a full disk, Orbax a bare Exception for others
            free = shutil.disk_usage(folder).free
            raise CheckpointError(
                f"{target}: writing failed ({_reason(error)}); the weights take {need} bytes, {free} bytes are "
                "free now; nothing was left behind"
            ) from error


class OrbaxSource:
    """A folder that `save_checkpoint` wrote.

    Raises:
        CheckpointError: a file is missing or damaged, or a newer jaxkv wrote it.
    """

    def __init__(self, folder: Path) -> None:
        self.location = folder
        marker = read_json(folder / CHECKPOINT_MARKER)
        if marker.get("format") != _FORMAT:
            raise CheckpointError(
                f"{folder}: format {marker.get('format')} is not known, this jaxkv reads {_FORMAT}; convert the model again"
            )
        self.digest = str(marker["digest"])
        self.config: Mapping[str, Any] = read_json(folder / "config.json")
        path = folder / "generation_config.json"
        self.generation_config: Mapping[str, Any] | None = read_json(path) if path.exists() else None

    @property
    def tokenizer_source(self) -> Path | None:
        return self.location if (self.location / "tokenizer_config.json").exists() else None

    @property
    def auto_dtype(self) -> np.dtype:
        return jax.numpy.dtype(self.config["dtype"])

    def reader(self, weights: WeightMap) -> "OrbaxReader":
        return OrbaxReader(self.location)


class OrbaxReader:
    """A `PieceReader`: each device reads its own part of the files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._params = (folder / _PARAMS).absolute()

    def check(self, pieces: Sequence[Piece]) -> None:
        with self._reading("its directory"), _checkpointer() as checkpointer:
            metadata: Any = checkpointer.metadata(self._params).item_metadata
            if metadata is None:  # Orbax only logs what was wrong
                raise ValueError("Orbax finds no tree there")
            leaves, _ = jax.tree_util.tree_flatten_with_path(metadata.tree)
        found = {"/".join(str(key.key) for key in path): tuple(leaf.shape) for path, leaf in leaves}
        check_shapes(self._folder, found, {"/".join(_keys(piece.path, piece.layer)): piece.shape for piece in pieces})

    def read(self, pieces: Iterable[Piece]) -> Iterator[jax.Array]:
        with _checkpointer() as checkpointer:
            for batch in _batches(pieces):
                yield from self._restore(checkpointer, batch)

    def _restore(self, checkpointer: ocp.Checkpointer, batch: Sequence[Piece]) -> list[jax.Array]:
        args: dict[str, Any] = {}
        for piece in batch:
            leaf = ocp.ArrayRestoreArgs(sharding=piece.sharding, global_shape=piece.shape, dtype=piece.dtype)
            _put(args, _keys(piece.path, piece.layer), leaf)
        item = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.global_shape, leaf.dtype), args)
        restore = ocp.args.PyTreeRestore(item=item, restore_args=args, partial_restore=True)
        names = f"{batch[0].path} to {batch[-1].path}" if len(batch) > 1 else batch[0].path
        with self._reading(names):
            restored = checkpointer.restore(self._params, args=restore)
        return [_get(restored, _keys(piece.path, piece.layer)) for piece in batch]

    @contextlib.contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Orbax raises a bare Exception around what TensorStore says
            raise CheckpointError(
                f"{self._params}: {what} cannot be read, the files are damaged or cut off ({_reason(error)}); "
                "convert the model again"
            ) from error


def _checkpointer() -> contextlib.closing[ocp.Checkpointer]:
    return contextlib.closing(ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False)))


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    num_bytes = 0
    for piece in pieces:
        if batch and num_bytes + piece.num_bytes > _BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(piece)
        num_bytes += piece.num_bytes
    if batch:
        yield batch


def _tree(model: nnx.Module, target: Path) -> dict[str, Any]:
    """The parameters as nested dicts with one entry per layer."""
    tree: dict[str, Any] = {}
    for path, leaf in nnx.to_flat_state(nnx.state(model)):
        name, layer = piece_name(path)
        if is_quantised(leaf):
            raise CheckpointError(
                f"{target}: {name} is quantised, and checkpoints hold weights as they are trained; save the model as it was "
                "loaded without quant, and give quant when you load the checkpoint"
            )
        value = leaf[...]
        if is_stacked(leaf):
            for index, part in enumerate(np.asarray(value)):
                _put(tree, _keys(name, index), part)
        else:
            _put(tree, _keys(name, layer), value)
    return tree


def _keys(path: str, layer: int | None) -> list[str]:
    """Where a piece lies in the stored tree."""
    first, *rest = path.split("/")
    return [first, *([] if layer is None else [str(layer)]), *rest]


def _put(tree: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
    tree[keys[-1]] = value


def _get(tree: Mapping[str, Any], keys: Sequence[str]) -> Any:
    for key in keys:
        tree = tree[key]
    return tree


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _reason(error: BaseException) -> str:
    """The innermost cause in a few words: TensorStore nests paths, and appends pages of specification."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = (str(error).splitlines() or [type(error).__name__])[0]
    before, found, _ = text.partition(" [os_error_code")
    return before.rpartition(": ")[2] if found else text[:200]

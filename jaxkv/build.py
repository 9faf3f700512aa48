"""From a model and settings to an engine: the one place that builds both towers."""

import itertools
import os
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxkv import ops, sharding
from jaxkv.cache import prefix_cache
from jaxkv.cache.tier_files import PageFolder, PageFormat
from jaxkv.cache.tier_store import TierStore
from jaxkv.catalog import cache_dir, open_model
from jaxkv.checkpoint.load import load_model, model_config
from jaxkv.checkpoint.source import ModelSource
from jaxkv.device import page_transfer
from jaxkv.device.compile_cache import use_compilation_cache
from jaxkv.device.program_cache import ProgramCache
from jaxkv.device.runner import Runner
from jaxkv.device.settings import EngineConfig, Resolved, resolve
from jaxkv.engine import Engine
from jaxkv.errors import ConfigError
from jaxkv.grammar.compiler import GrammarCompiler
from jaxkv.grammar.room import GrammarRoom
from jaxkv.grammar.vocabulary import TokenVocabulary, make_vocabulary, vocabulary_of
from jaxkv.intake import Intake
from jaxkv.models.config import ModelConfig
from jaxkv.models.kv_heads import copy_kv_heads
from jaxkv.models.registry import Family
from jaxkv.schedule.scheduler import Scheduler
from jaxkv.tokenizer import Tokenizer, load_tokenizer
from jaxkv.tool_formats import SPECIAL_TEXTS


def build_engine(
    model: str | os.PathLike[str],
    config: EngineConfig,
    *,
    dtype: str,
    quant: str | None,
    tensor: int,
    data: int,
    progress: bool | None,
) -> tuple[Engine, Intake]:
    """Loads a model onto the first `data * tensor` devices; arguments and errors as in `LLM.load`.

    Returns:
        The engine, and the intake that makes its requests.
    """
    keeps_programs = use_compilation_cache(cache_dir() / "xla")
    mesh = sharding.make_mesh(tensor, data)
    source = open_model(model)
    family, geometry = model_config(source)
    geometry = copy_kv_heads(geometry.for_len(config.max_len), tensor)
    backend = ops.select(mesh.devices.flat[0].platform, mesh.devices.flat[0].device_kind, quantised=quant is not None)
    np_dtype = _resolve_dtype(dtype, source, backend)
    module = load_model(
        source, family, geometry, dtype=np_dtype, mesh=mesh, per_layer=backend.per_layer, quant=quant, progress=progress
    )
    resolved = resolve(config, geometry, jnp.dtype(np_dtype), mesh, backend)
    programs = _program_cache(family, geometry, resolved, mesh) if keeps_programs else None
    tokenizer = _load_tokenizer(source)
    namespace = _namespace(source, family, geometry, resolved, np_dtype, quant)
    scheduler = Scheduler(resolved.scheduler, namespace)
    runner = Runner.build(module, resolved, mesh, vocab_size=geometry.vocab_size, cache=programs)
    store = _open_tiers(config, str(model), namespace, scheduler, runner)
    grammars = _grammars(tokenizer, geometry.vocab_size, resolved) if tokenizer is not None else None
    engine = Engine(scheduler, runner, tokenizer, overlap=config.overlap, store=store, grammars=grammars)
    return engine, Intake(vocab_size=geometry.vocab_size, eos_ids=_eos_ids(source, tokenizer), tokenizer=tokenizer)


def _resolve_dtype(dtype: str, source: ModelSource, backend: ops.Backend) -> np.dtype:
    names = {"float32": jnp.float32, "f32": jnp.float32, "bfloat16": jnp.bfloat16, "bf16": jnp.bfloat16}
    if dtype == "auto":
        return backend.auto_dtype or source.auto_dtype
    if dtype not in names:
        raise ConfigError(f"dtype={dtype!r} is not one of auto, float32, bfloat16")
    return np.dtype(names[dtype])


def _grammars(tokenizer: Tokenizer, vocab_size: int, resolved: Resolved) -> GrammarCompiler:
    room = GrammarRoom(resolved.scheduler.grammars, resolved.scheduler.max_rows)  # only to ask what fits

    def make(for_tools: bool) -> TokenVocabulary:
        usable = {tokenizer.vocabulary.token_id(text) for text in SPECIAL_TEXTS}
        if not for_tools or not usable & tokenizer.special_ids:
            return vocabulary_of(tokenizer, vocab_size)
        tokens = [tokenizer.token_bytes(i) for i in range(min(tokenizer.vocab_size, vocab_size))]
        return make_vocabulary(
            tokens, size=vocab_size, excluded=tokenizer.special_ids - usable, end_ids=tokenizer.eos_ids
        )

    return GrammarCompiler(make, room.fits)


def _program_cache(family: Family, geometry: ModelConfig, resolved: Resolved, mesh: Mesh) -> ProgramCache:
    pool, backend, config = resolved.pool, resolved.backend, resolved.scheduler
    facts = (
        family.name, family.revision, geometry, backend.name, backend.query_tile, pool.shape, pool.groups, pool.dtype.name,
        config.max_rows, config.max_len, config.decode_steps, config.grammars, dict(mesh.shape),
    )  # fmt: skip
    return ProgramCache(cache_dir() / "programs", list(mesh.devices.flat), *facts)


def _load_tokenizer(source: ModelSource) -> Tokenizer | None:
    if source.tokenizer_source is None:
        return None
    return load_tokenizer(source.tokenizer_source, generation_config=source.generation_config)


def _eos_ids(source: ModelSource, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The tokenizer knows them all; without one, the configs say what they can."""
    if tokenizer is not None:
        return tuple(sorted(tokenizer.eos_ids))
    values = ((source.generation_config or {}).get("eos_token_id"), source.config.get("eos_token_id"))
    ids = itertools.chain.from_iterable(v if isinstance(v, list) else [v] for v in values if v is not None)
    return tuple(sorted(set(ids)))


def _open_tiers(config: EngineConfig, model: str, namespace: bytes, scheduler: Scheduler, runner: Runner) -> TierStore:
    """The lower tiers' store; what an earlier process left on disk can be found from now on."""
    if not scheduler.config.tiers.disk_pages or config.cache_dir is None:
        return TierStore(None)
    spec = runner.pool_spec
    page = PageFormat(
        root=prefix_cache.root_key(namespace),
        model=model,
        kv_dtype=spec.dtype.name,
        shape=page_transfer.canonical_shape(spec),
        bits=page_transfer.canonical_dtype(spec),
    )
    folder = PageFolder(Path(config.cache_dir).expanduser(), page)
    scheduler.tiers.restore(folder.scan(), time.monotonic())
    return TierStore(folder)


def _namespace(
    source: ModelSource,
    family: Family,
    geometry: ModelConfig,
    resolved: Resolved,
    dtype: np.dtype,
    quant: str | None,
) -> bytes:
    """The activations' dtype counts, and whether weights are quantised: pages outlive the process, and rounded ones differ."""
    pool = resolved.pool
    return prefix_cache.namespace(
        model=f"{source.digest}{family.revision} {dtype.name}{f' {quant}' if quant else ''}",
        kv_dtype=pool.dtype.name,
        page_size=pool.page_size,
        rope=repr(geometry.ropes),
    )

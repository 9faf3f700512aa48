"""Runs other engines on the same prompts, in processes of their own (`scripts/baselines` of a source checkout)."""

import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import jaxkv
from jaxkv.bench.workloads import Workload
from jaxkv.errors import ConfigError

_SCRIPTS = {"hf": "hf.py", "contiguous": "contiguous.py"}
_DTYPES = {"float32": "f32", "bfloat16": "bf16"}


def command(name: str, model: str) -> list[str]:
    """What starts a peer, without its workload.

    Raises:
        ConfigError: there is no source checkout, or the model is not one the peers load.
    """
    script = pathlib.Path(jaxkv.__file__).parents[1] / "scripts" / "baselines" / _SCRIPTS[name]
    if not script.exists():
        raise ConfigError(
            f"--compare {name} runs {script.name} from a source checkout; it is not in the installed package"
        )
    if str(model).endswith(".gguf"):
        return [sys.executable, str(script), "--gguf", str(model)]
    if model != "smollm2":
        raise ConfigError(f"--compare {name} loads GGUF files of Llama models, not {model!r}")
    return [sys.executable, str(script)]


def run(name: str, workload: Workload, *, model: str, dtype: str, repeats: int) -> dict[str, Any]:
    """The result a peer printed, see `scripts/baselines/report.py`.

    Raises:
        ConfigError: see `command`; or the peer failed.
    """
    arguments = ["--dtype", _DTYPES[dtype], "--repeats", str(repeats), "--json"]
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "workload.json"
        path.write_text(workload.to_json())
        print(f"running {name} ...", file=sys.stderr, flush=True)
        done = subprocess.run(
            [*command(name, model), *arguments, "--workload-file", str(path)],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
    if done.returncode:
        raise ConfigError(f"--compare {name}: it failed with exit status {done.returncode}; its output is above")
    return json.loads(done.stdout.splitlines()[-1])

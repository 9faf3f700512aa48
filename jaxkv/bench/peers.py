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


def run(name: str, workload: Workload, *, model: str, dtype: str, repeats: int) -> dict[str, Any]:
    """The result a peer printed, see `scripts/baselines/report.py`.

    Raises:
        ConfigError: there is no source checkout, the model is not one the peers load, or the peer failed.
    """
    script = pathlib.Path(jaxkv.__file__).parents[1] / "scripts" / "baselines" / _SCRIPTS[name]
    if not script.exists():
        raise ConfigError(
            f"--compare {name} runs {script.name} from a source checkout; it is not in the installed package"
        )
    command = [sys.executable, str(script), "--dtype", _DTYPES[dtype], "--repeats", str(repeats), "--json"]
    if str(model).endswith(".gguf"):
        command += ["--gguf", str(model)]
    elif model != "smollm2":
        raise ConfigError(f"--compare {name} loads GGUF files of Llama models, not {model!r}")
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "workload.json"
        path.write_text(workload.to_json())
        print(f"running {name} ...", file=sys.stderr, flush=True)
        done = subprocess.run([*command, "--workload-file", str(path)], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ConfigError(
            f"--compare {name}: {script.name} failed with exit status {done.returncode}; its output is above"
        )
    return json.loads(done.stdout.splitlines()[-1])

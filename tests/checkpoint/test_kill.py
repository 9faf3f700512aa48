"""kill -9 at any moment leaves a complete checkpoint or none."""

import random
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from jaxkv.checkpoint.hf import HfSource
from jaxkv.checkpoint.orbax import OrbaxSource
from jaxkv.convert import convert
from tests.checkpoint.tools import BF16, assert_same_params, hf_config, load, random_tensors, write_hf

CONFIG = hf_config(hidden_size=256, intermediate_size=1024, num_hidden_layers=8, vocab_size=4096)
# Saves one checkpoint after the other until it is killed.
WRITER = """
    import functools, itertools, sys
    from pathlib import Path
    from jaxkv import convert as module

    module.load_model = functools.cache(module.load_model)
    module.open_model = functools.cache(module.open_model)
    module.model_config = functools.cache(module.model_config)
    for i in itertools.count():
        print("saving", flush=True)
        module.convert(Path(sys.argv[1]), Path(sys.argv[2]) / f"out-{i}")
"""


@pytest.mark.slow
def test_kill_nine_leaves_whole_checkpoints_only(tmp_path: Path) -> None:
    source = HfSource(write_hf(tmp_path / "hf", CONFIG, random_tensors(CONFIG, BF16)))
    expected = load(source, dtype=BF16)
    rng = random.Random(0)
    num_complete = num_leftovers = 0
    for trial in range(8):
        out = tmp_path / f"trial-{trial}"
        command = [sys.executable, "-c", textwrap.dedent(WRITER), str(source.location), str(out)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None
            for _ in range(2):  # the first one compiles and imports
                assert process.stdout.readline() == "saving\n"
            time.sleep(rng.uniform(0, 0.6))
            process.kill()
        partial = [path for path in out.iterdir() if path.name.endswith(".partial")]
        complete = [path for path in out.iterdir() if not path.name.endswith(".partial")]
        assert len(partial) <= 1 and len(complete) >= 1
        for path in complete:
            assert_same_params(load(OrbaxSource(path), dtype=BF16), expected)
        num_complete += len(complete)
        num_leftovers += len(partial)
        for path in partial:  # the next convert takes it over
            name = path.name.removeprefix(".").removesuffix(".partial")
            convert(source.location, out / name)
            assert not path.exists()
            assert_same_params(load(OrbaxSource(out / name), dtype=BF16), expected)
    print(f"{num_complete} complete, {num_leftovers} left over")
    assert num_leftovers >= 2  # otherwise nothing was hit

"""Names of topologies, and figures of chips."""

import sys

import pytest

from jaxkv.capacity import topology
from jaxkv.capacity.chips import CHIPS, GIB
from jaxkv.capacity.topology import parse_topology
from jaxkv.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "chip", "dims", "num_devices"),
    [
        ("v6e:2x4", "v6e", (2, 4), 8),
        ("v5e:1x1", "v5e", (1, 1), 1),
        ("V5E:4x4", "v5e", (4, 4), 16),
        ("v5p:2x2x1", "v5p", (2, 2, 1), 4),
        ("tpu7x:2x2x1", "tpu7x", (2, 2, 1), 8),  # two devices a chip
        ("h200x8", "h200", (8,), 8),
        ("b200x1", "b200", (1,), 1),
    ],
)
def test_parses(name: str, chip: str, dims: tuple[int, ...], num_devices: int) -> None:
    found = parse_topology(name)
    assert (found.chip.name, found.dims, found.num_devices) == (chip, dims, num_devices)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("v6e-8", "is not CHIP:AxB"),
        ("", "is not CHIP:AxB"),
        ("v9x:2x2", "known are v5e"),
        ("p100x8", "known are v5e"),
        ("v6e:2x2x2", "written like v6e:2x2"),
        ("tpu7x:2x2", "written like tpu7x:2x2x2"),
        ("h200:8", "written like h200x8"),
        ("h200x0", "has no devices"),
        ("v6e:0x4", "has no devices"),
    ],
)
def test_refuses(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_topology(name)


def test_figures_are_plausible() -> None:
    """Slips of a unit: nothing here is off by a thousand."""
    for chip in CHIPS.values():
        assert 15 * GIB < chip.usable_bytes < chip.hbm_bytes * 1.01 < 200 * GIB
        assert 0.5e12 < chip.hbm_bytes_s < 10e12 and 100e12 < chip.bf16_flops < 3000e12
        assert 100e9 <= chip.link_bytes_s < chip.hbm_bytes_s
        assert chip.int8_ops is None or 1.9 < chip.int8_ops / chip.bf16_flops < 2.1
        assert (chip.gpu is not None) == (chip.platform == "gpu")


def test_tpu7x_device_is_half_a_chip() -> None:
    assert CHIPS["tpu7x"].hbm_bytes == 96 * GIB and CHIPS["tpu7x"].hbm_bytes_s == 3.69e12


def test_gpu_target_is_text_for_xla() -> None:
    text = topology.gpu_target(CHIPS["h200"])
    assert "cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }" in text
    assert "feature_extension" not in topology.gpu_target(CHIPS["a100"])


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("libtpu", "jax_plugins.xla_cuda13"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(topology, "_is_there", lambda module: False)
    with pytest.raises(ConfigError, match=r"needs libtpu.*pip install 'jaxkv\[plan\]'"):
        topology.check_compiler(CHIPS["v6e"])
    with pytest.raises(ConfigError, match=r"needs jax-cuda13-plugin.*pip install 'jaxkv\[plan\]'"):
        topology.check_compiler(CHIPS["h100"])


def test_share_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    chip = CHIPS["h200"]
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    assert topology.usable_bytes(chip) == int(chip.hbm_bytes * 0.75)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", ".9")
    assert topology.usable_bytes(chip) == int(chip.hbm_bytes * 0.9)
    assert topology.usable_bytes(CHIPS["v6e"]) == CHIPS["v6e"].usable_bytes
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "most")
    with pytest.raises(ConfigError, match="'most' must be a number"):
        topology.usable_bytes(chip)

import pytest

from jaxkv.errors import ConfigError
from jaxkv.kv_math import format_bytes, gqa_saving, kv_cache_bytes, kv_cache_tokens, peak_kv_cache_bytes

GPT3 = {"num_layers": 96, "hidden_size": 12288}
KI, MI, GI = 2**10, 2**20, 2**30


def test_textbook_figures_of_96_layers_12288_wide() -> None:
    assert kv_cache_bytes(num_layers=1, hidden_size=12288, num_tokens=1) == 48 * KI
    assert kv_cache_bytes(**GPT3, num_tokens=1) == 4.5 * MI
    assert kv_cache_bytes(**GPT3, num_tokens=128 * KI) == 576 * GI


def test_batch_tokens_and_dtype_multiply() -> None:
    one = kv_cache_bytes(**GPT3, num_tokens=1)
    assert kv_cache_bytes(**GPT3, num_tokens=7, batch=3) == 21 * one
    assert kv_cache_bytes(**GPT3, num_tokens=1, dtype_bytes=4) == 2 * one
    assert kv_cache_bytes(**GPT3, num_tokens=1, dtype_bytes=1) == one / 2


def test_width_from_heads_equals_hidden_size_under_multi_head_attention() -> None:
    assert kv_cache_bytes(num_layers=96, num_kv_heads=96, head_dim=128, num_tokens=5) == kv_cache_bytes(
        **GPT3, num_tokens=5
    )


def test_grouped_query_models() -> None:
    # Llama-3-8B: 32 layers, 8 KV heads of 128: 128 KiB a token; SmolLM2-135M in bf16: 30 layers, 3 heads of 64.
    assert kv_cache_bytes(num_layers=32, num_kv_heads=8, head_dim=128, num_tokens=1) == 128 * KI
    assert kv_cache_bytes(num_layers=30, num_kv_heads=3, head_dim=64, num_tokens=1) == 23040


def test_peak_is_4_b_l_h_s_plus_n() -> None:
    # FlexGen's example: OPT-175B, b = 512, s = 512, n = 32 takes 1.2 TB.
    peak = peak_kv_cache_bytes(batch=512, num_layers=96, hidden_size=12288, prompt_len=512, output_len=32)
    assert peak == 4 * 512 * 96 * 12288 * (512 + 32)
    assert 1.1e12 < peak < 1.4e12


def test_tokens_that_fit_round_down() -> None:
    assert kv_cache_tokens(9 * MI, **GPT3) == 2
    assert kv_cache_tokens(9 * MI - 1, **GPT3) == 1
    assert kv_cache_tokens(0, **GPT3) == 0
    assert kv_cache_tokens(GI, num_layers=32, num_kv_heads=8, head_dim=128) == 8192


def test_gqa_saving() -> None:
    assert gqa_saving(num_heads=9, num_kv_heads=3) == 3
    assert gqa_saving(num_heads=64, num_kv_heads=8) == 8
    assert gqa_saving(num_heads=8, num_kv_heads=8) == 1
    full = kv_cache_bytes(num_layers=32, num_kv_heads=32, head_dim=128, num_tokens=100)
    grouped = kv_cache_bytes(num_layers=32, num_kv_heads=8, head_dim=128, num_tokens=100)
    assert full / grouped == gqa_saving(num_heads=32, num_kv_heads=8)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (48 * KI, "48 KiB"),
        (int(4.5 * MI), "4.5 MiB"),
        (576 * GI, "576 GiB"),
        (MI - 1, "1 MiB"),
        (10 * 2**50 * 1024, "10240 PiB"),
    ],
)
def test_format_bytes(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize("name", ["num_layers", "num_tokens", "batch", "dtype_bytes", "hidden_size"])
def test_impossible_values_are_named(name: str) -> None:
    arguments = {**GPT3, "num_tokens": 1, name: 0}
    with pytest.raises(ConfigError, match=f"{name}=0 must be >= 1"):
        kv_cache_bytes(**arguments)


def test_width_must_be_given_exactly_once() -> None:
    with pytest.raises(ConfigError, match="twice"):
        kv_cache_bytes(num_layers=1, hidden_size=64, head_dim=8, num_tokens=1)
    with pytest.raises(ConfigError, match="must both be given"):
        kv_cache_bytes(num_layers=1, num_kv_heads=8, num_tokens=1)
    with pytest.raises(ConfigError, match="must both be given"):
        kv_cache_bytes(num_layers=1, num_tokens=1)


def test_other_refusals() -> None:
    with pytest.raises(ConfigError, match="multiple of num_kv_heads=4"):
        gqa_saving(num_heads=9, num_kv_heads=4)
    with pytest.raises(ConfigError, match="memory_bytes=-1"):
        kv_cache_tokens(-1, **GPT3)
    with pytest.raises(ConfigError, match="num_bytes=-5"):
        format_bytes(-5)

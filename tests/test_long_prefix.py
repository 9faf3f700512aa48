"""`jaxkv bench prefix --long-len`, on a device that costs nothing."""

import pytest

from jaxkv.bench.long_prefix import time_long_prefix
from jaxkv.cli.command import build_parser
from jaxkv.errors import ConfigError
from jaxkv.intake import Intake
from tests.session_stage import fake_llm


def test_one_cold_start_and_hits_on_whole_pages():
    llm = fake_llm()
    llm._intake = Intake(vocab_size=30_000, eos_ids=())
    result = time_long_prefix(llm, 50, 5, repeats=3)
    assert result["prefix_tokens"] == 50 and result["cold_ttft_s"] >= 0 and result["hit_ttft_s"] >= 0
    stats = llm._engine.stats()
    assert stats.num_cached_tokens == 3 * 48 and stats.num_prompt_tokens == 4 * 55


def test_what_does_not_fit_is_said():
    with pytest.raises(ConfigError, match="--long-len 60 needs max_len=66, it is 64; raise --max-len"):
        time_long_prefix(fake_llm(), 60, 5, repeats=1)


def test_the_flag():
    parse = build_parser().parse_args
    assert parse(["bench", "prefix", "-m", "x"]).long_len is None
    args = parse(["bench", "prefix", "-m", "x", "--long-len", "10000"])
    assert args.long_len == 10000 and args.given == ("--long-len",)

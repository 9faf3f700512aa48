"""Layers in groups: every layer has a place of its own, and pages waste little."""

import hypothesis
import hypothesis.strategies as st
import pytest

from jaxkv.capacity.known import KNOWN
from jaxkv.models.groups import MAX_PADDING, LayerGroups, group_layers, one_group
from jaxkv.models.registry import find_family

MAX_LEN = 8192


@hypothesis.given(st.lists(st.sampled_from([None, 4, 512, MAX_LEN]), min_size=1, max_size=70))
def test_every_layer_has_a_place_of_its_own(windows: list[int | None]) -> None:
    groups = group_layers(windows, MAX_LEN)
    places = list(zip(groups.group_of, groups.place_of, strict=True))
    assert len({*places}) == len(windows)
    assert all(0 <= place < groups.size for place in groups.place_of)
    assert {*groups.group_of} == {*range(groups.num)}, "none is empty"
    assert groups.size * groups.num - len(windows) <= MAX_PADDING * len(windows)
    for layer, window in enumerate(windows):
        assert groups.windows[groups.group_of[layer]] == (None if window == MAX_LEN else window)


@pytest.mark.parametrize(
    ("name", "size", "windows"),
    [
        ("gemma-3-270m", 3, (None, *[512] * 5)),
        ("gemma-3-1b", 4, (None, *[512] * 6)),  # 4 and 22 layers: two places of 28 stay empty
        ("gemma-2-2b", 13, (None, 4096)),
        ("mistral-7b-v0.1", 32, (4096,)),
        ("llama-3.1-8b", 32, (None,)),
    ],
)
def test_published_models(name: str, size: int, windows: tuple[int | None, ...]) -> None:
    config = KNOWN[name]
    groups = group_layers(find_family(config).config_from_hf(config).windows, MAX_LEN)
    assert (groups.size, groups.windows) == (size, windows)


def test_windows_that_nothing_leaves_do_not_matter() -> None:
    assert group_layers([512, None, 512], 512) == one_group(3) == LayerGroups(3, (None,), (0, 0, 0), (0, 1, 2))

"""Layers whose K/V share pages: a page holds tokens of one *group* of layers, which all have the same window.

Where only some layers see everything, keeping all K/V of the others wastes most of the pool (5/6 of Gemma 3's layers see 512
or 1024 tokens). So layers are split into groups of equal size, each with page tables of its own over one pool: pages that
all tokens of a window group have left are given back while the request runs. The idea of one allocator for equal pages of
all groups is that of vLLM's hybrid KV cache manager.

Axis letters: L layers, G groups.
"""

import dataclasses
from collections.abc import Sequence

MAX_PADDING = 1 / 6  # of all layers: places of a page that no layer uses, where groups cannot all be full


@dataclasses.dataclass(frozen=True)
class LayerGroups:
    """Which layer's K/V are where."""

    size: int  # layers of a page
    windows: tuple[int | None, ...]  # [G]: tokens that the layers of each group see; None: all
    group_of: tuple[int, ...]  # [L]
    place_of: tuple[int, ...]  # [L]: in the pages of its group

    @property
    def num(self) -> int:
        """G."""
        return len(self.windows)


def one_group(num_layers: int) -> LayerGroups:
    """All layers in one group; nothing is given back while a request runs."""
    return LayerGroups(num_layers, (None,), (0,) * num_layers, tuple(range(num_layers)))


def group_layers(windows: Sequence[int | None], max_len: int) -> LayerGroups:
    """Groups for sequences of up to `max_len` tokens; those whose layers see everything come first.

    A group has as many layers as see what the fewest layers see, unless too many places would stay empty: then fewer.
    Few large groups mean few page tables and large reads.

    Args:
        windows: of each layer; None: it sees everything.
        max_len: windows that are not smaller do not matter.
    """
    seen = [None if window is None or window >= max_len else window for window in windows]
    kinds = sorted(dict.fromkeys(seen), key=lambda window: (window is not None, window or 0))
    layers = {window: [layer for layer, other in enumerate(seen) if other == window] for window in kinds}

    def num_groups(size: int) -> int:
        return sum(-(-len(members) // size) for members in layers.values())

    most = min(map(len, layers.values()))
    size = next(n for n in range(most, 0, -1) if num_groups(n) * n - len(seen) <= MAX_PADDING * len(seen))
    group_of, place_of, of_groups = [0] * len(seen), [0] * len(seen), []
    for window, members in layers.items():
        for index, layer in enumerate(members):
            group_of[layer], place_of[layer] = len(of_groups) + index // size, index % size
        of_groups += [window] * -(-len(members) // size)
    return LayerGroups(size, tuple(of_groups), tuple(group_of), tuple(place_of))

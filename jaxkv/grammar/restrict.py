"""Token tables for outputs that may only be written with some of the tokens."""

import dataclasses

import numpy as np

from jaxkv.errors import RequestError
from jaxkv.grammar.tables import TokenTables
from jaxkv.grammar.windows import plain_windows

FAR = 1 << 30


def restrict(tables: TokenTables, allowed_token_ids: tuple[int, ...]) -> TokenTables:
    """The same language, written with `allowed_token_ids` only; where they lead nowhere, masks are closed.

    Raises:
        RequestError: no text of the language can be written with them, or its counted strings are not supported.
    """
    if tables.count is not None:
        raise RequestError(
            "allowed_token_ids cannot be combined with strings of limited length (minLength, maxLength, counted repeats); "
            "leave one of them out"
        )
    usable = np.zeros(tables.vocab_size, bool)
    usable[list(allowed_token_ids)] = True
    has_token = np.zeros(tables.next.shape[1], bool)
    has_token[np.unique(tables.class_of[usable])] = True
    has_token[0] = False
    dist = _distances(tables, has_token)
    if dist[tables.start] == FAR:
        raise RequestError("allowed_token_ids: no text that the grammar allows can be written with these tokens")
    after = np.where(has_token[None, :] & (tables.next != 0), dist[tables.next], FAR)  # [S, K]
    live = after < FAR
    masks, mask_of = _masks(tables, live, usable)
    return dataclasses.replace(
        tables,
        next=np.where(live, tables.next, 0).astype(np.uint16),
        mask_windows=plain_windows(np.arange(len(mask_of))),
        mask_of=mask_of,
        masks=masks,
        dist_windows=plain_windows(np.arange(len(dist))),
        dist_of=dist.astype(np.int32),
        slack=np.where(live, after, 0).max(axis=1).astype(np.int32),
    )


def _distances(tables: TokenTables, has_token: np.ndarray) -> np.ndarray:
    """int64 [S]: fewest tokens to acceptance; FAR where there is no way."""
    dist = np.where(tables.accepting, 0, FAR).astype(np.int64)
    follow = tables.next[:, has_token]
    while follow.shape[1]:
        best = np.where(follow != 0, dist[follow], FAR).min(axis=1)
        better = np.minimum(dist, np.minimum(best + 1, FAR))
        if (better == dist).all():
            break
        dist = better
    return dist


def _masks(tables: TokenTables, live: np.ndarray, usable: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct masks of all states, and the mask of each: a token is allowed if it is usable and its class is live."""
    rows, mask_of = np.unique(live, axis=0, return_inverse=True)
    width = -(-tables.vocab_size // 32) * 32
    masks = np.zeros((len(rows), width // 32), np.uint32)
    for index, row in enumerate(rows):
        flags = np.zeros(width, bool)
        flags[: tables.vocab_size] = row[tables.class_of] & usable
        masks[index] = np.packbits(flags.reshape(-1, 32), axis=1, bitorder="little").view("<u4")[:, 0]
    return masks, mask_of.reshape(-1).astype(np.int32)

"""The pieces of several requests as they come."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from jaxkv.outputs import Piece
from jaxkv.serve.engine_thread import Handle


async def merged(handles: Sequence[Handle]) -> AsyncGenerator[tuple[int, list[Piece]], None]:
    """Yields (which of the requests, its new pieces) until all are over."""
    if len(handles) == 1:  # nearly always, and without a task for each wait
        while pieces := await handles[0].pieces():
            yield 0, pieces
        return
    waiting = {asyncio.ensure_future(handle.pieces()): index for index, handle in enumerate(handles)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(task)
                if pieces := task.result():
                    yield index, pieces
                    waiting[asyncio.ensure_future(handles[index].pieces())] = index
    finally:
        for task in waiting:
            task.cancel()

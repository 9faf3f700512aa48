"""`LLM.save_prefix`: a prompt's pages go to disk now, not only when memory runs out."""

import dataclasses
from collections.abc import Callable, Iterable

from jaxkv.engine import MAX_WAIT_S, Engine
from jaxkv.errors import CapacityError, RequestError
from jaxkv.request import Request, RequestOutput


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedPrefix:
    """What of a prompt is on disk: whole pages only."""

    num_tokens: int
    num_pages: int
    num_bytes: int  # of their files


def save_prefix(
    engine: Engine, request: Request, compute: Callable[[], Iterable[RequestOutput]], ttl_s: float | None = None
) -> SavedPrefix:
    """Writes the full pages of a request's prompt, and waits until they are on the disk.

    Args:
        engine: its scheduler knows the pages.
        request: its prompt and salt count; it is not queued.
        compute: runs the prompt, if not all of its pages are known; what came of it.
        ttl_s: how long they are to be kept, from their last use on; None: while there is room.

    Raises:
        RequestError: the engine has no disk tier.
        CapacityError: the prompt could not be computed, or not all pages could be written.
    """
    scheduler, folder = engine.scheduler, engine.mover.store.folder
    if folder is None:
        raise RequestError("save_prefix needs a folder for its pages; load with cache_dir=...")
    num_pages = len(request.prompt_token_ids) // scheduler.config.page_size
    done, num_known = scheduler.save(request, ttl_s)
    _flush(engine)
    if num_known < num_pages:
        for output in compute():
            if (error := output.outputs[0].error) is not None:
                raise CapacityError(f"the prompt's pages could not be computed: {error}")
    while done < num_pages:
        before = done
        done, num_known = scheduler.save(request, ttl_s)
        _flush(engine)
        if done <= before and done < num_pages:
            break
    num_saved = scheduler.num_on_disk(request)
    if num_saved < num_pages:
        raise CapacityError(
            f"{num_saved} of {num_pages} pages of {folder.page.file_bytes:,} bytes are in {folder.folder}: its budget holds "
            f"{scheduler.config.tiers.disk_pages} pages; raise disk_cache_bytes, or see the log for what the disk said"
        )
    page_size = scheduler.config.page_size
    return SavedPrefix(
        num_tokens=num_pages * page_size, num_pages=num_pages, num_bytes=num_pages * folder.page.file_bytes
    )


def _flush(engine: Engine) -> None:
    """Carries out what was decided, and waits until nothing is to be written any more."""
    engine.move_pages()
    while engine.scheduler.tiers.num_outgoing or engine.mover.store.is_busy:
        engine.mover.wait(MAX_WAIT_S)
        engine.move_pages()

"""The report for people."""

from collections.abc import Iterator, Sequence

from jaxkv.capacity.plan import Report
from jaxkv.kv_math import format_bytes


def render(report: Report) -> str:
    """Several short tables, one under the other."""
    return "\n".join(_lines(report))


def _lines(r: Report) -> Iterator[str]:
    devices = f"{r.num_devices} x {r.device_kind}, tensor={r.tensor} data={r.data}"
    weights = f" with matrices in {r.quant}" if r.quant else ""
    yield f"{r.model} on {r.topology}: {devices}, {r.dtype}{weights}, K/V in {r.kv_dtype}"
    yield ""
    yield from _memory(r)
    if not r.fits:
        yield ""
        yield from _refusal(r)
        return
    yield ""
    yield from table(("tokens a row", "rows that fit"), [(f"{x.context_len:,}", f"{x.num_rows:,}") for x in r.rows_at])
    yield ""
    yield from _programs(r)
    yield ""
    yield from _roofline(r)


def _memory(r: Report) -> Iterator[str]:
    b = r.budget
    rows = [
        ("weights", format_bytes(b.weights)),
        ("row state", format_bytes(b.state)),
        ("temporaries", format_bytes(b.temp)),
        ("pages", format_bytes(b.num_pages * b.page)),
        ("usable", format_bytes(b.usable)),
    ]
    yield from table(("memory of a device", ""), rows)
    yield (
        f"cache: {r.num_pages:,} pages of {r.page_size} tokens ({format_bytes(b.page)} each) for each of {r.data} data "
        f"shard(s), {r.num_tokens:,} tokens in all"
    )
    if r.windows != (None,):
        num_whole = r.windows.count(None)
        windows = ", ".join(f"{n:,}" for n in sorted({window for window in r.windows if window is not None}))
        yield (
            f"layers are in {len(r.windows)} groups with pages of their own: {num_whole} keep all tokens, "
            f"{len(r.windows) - num_whole} those in their window ({windows} tokens)"
        )


def _refusal(r: Report) -> Iterator[str]:
    what = f"weights and one row of {r.max_len:,} tokens" if r.budget.free > 0 else "the weights"
    yield f"DOES NOT FIT: {what} need {format_bytes(r.missing_bytes)} more on each device"
    if not r.advice:
        yield "no setting of this model holds it on chips of this kind"
    for advice in r.advice:
        yield f"  {advice.setting}: {advice.effect}"


def _programs(r: Report) -> Iterator[str]:
    rows = [
        (
            step.program,
            f"{step.num_tokens:,}",
            format_bytes(step.temp_bytes),
            ", ".join(f"{n} {kind}" for kind, n in sorted(step.collectives.items())) or "none",
            f"{step.compile_s:.1f}",
        )
        for step in r.steps
    ]
    yield from table(("program", "tokens", "temporaries", "collectives a layer", "compiled in s"), rows)
    for program, found in r.complaints.items():
        for complaint in found:
            yield f"  {program}: {complaint}"
    yield from (f"  {note}" for note in r.notes)
    if not any(r.complaints.values()):
        yield "  all update the pool in place and copy none of it"
    yield f"  attention: {r.steps[0].attention}"


def _roofline(r: Report) -> Iterator[str]:
    if not r.bounds:
        yield "no row of the asked context length fits"
        return
    context = r.bounds[0].context_len
    rows = [
        (
            f"{at.rows:,}",
            f"{at.bound.memory_s * 1e3:.2f}",
            f"{at.bound.compute_s * 1e3:.2f}",
            f"{at.bound.link_s * 1e3:.2f}",
            at.bound.rules,
            f"{at.tokens_s:,.0f}",
        )
        for at in r.bounds
    ]
    yield f"decode at {context:,} tokens a row, at best (bandwidths and FLOP/s of the data sheet):"
    yield from table(("rows", "memory ms", "compute ms", "links ms", "bound by", "tokens/s <="), rows)
    if r.steps:
        yield (
            f"  the compiled step moves {format_bytes(int(r.moved_bytes))} a device at {r.steps[0].num_tokens} rows, "
            f"{r.moved_bytes / r.min_bytes:.2f} x the least ({format_bytes(int(r.min_bytes))})"
        )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns as wide as they need; all but the first are aligned right."""
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    for line in lines:
        cells = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()

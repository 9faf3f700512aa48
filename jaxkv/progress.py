"""A progress bar on stderr for work that takes a while. Silent where nobody looks: in logs, pipes and tests."""

import sys
import time
from types import TracebackType
from typing import TextIO

_WIDTH = 24  # characters of the bar
_INTERVAL_S = 0.1  # between redraws


class Progress:
    """Shows how much of a known total is done.

        with Progress("loading", total=num_bytes, unit="B") as progress:
            progress.advance(1024)

    Args:
        label: what is being done.
        total: of units; 0 shows no bar until it is known.
        unit: "B" is scaled to MB and GB, other units are counted as they are.
        show: None shows it only if `file` is a terminal.
        file: None is `sys.stderr`.
    """

    def __init__(
        self, label: str, *, total: int, unit: str = "", show: bool | None = None, file: TextIO | None = None
    ) -> None:
        self._file = sys.stderr if file is None else file
        self._show = self._file.isatty() if show is None else show
        self._label, self._total, self._unit = label, total, unit
        self._done = 0
        self._start_s = time.monotonic()
        self._drawn_s = 0.0

    def advance(self, amount: int) -> None:
        """Adds to what is done."""
        self._done += amount
        if self._show and time.monotonic() - self._drawn_s >= _INTERVAL_S:
            self._draw()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Draws the last state; its line stays."""
        if self._show:
            self._draw()
            self._file.write("\n")
            self._file.flush()

    def _draw(self) -> None:
        self._drawn_s = time.monotonic()
        share = min(self._done / self._total, 1.0) if self._total else 0.0
        bar = "#" * round(share * _WIDTH)
        elapsed_s = self._drawn_s - self._start_s
        amount = f"{self._amount(self._done)} of {self._amount(self._total)}"
        self._file.write(f"\r{self._label} [{bar:<{_WIDTH}}] {share:4.0%}  {amount}  {elapsed_s:.1f} s\x1b[K")
        self._file.flush()

    def _amount(self, value: int) -> str:
        if self._unit != "B":
            return f"{value} {self._unit}".rstrip()
        return f"{value / 1e9:.2f} GB" if self._total >= 1e9 else f"{value / 1e6:.0f} MB"

"""The bound on decode speed against batch size, as a PNG."""

import importlib.util

from jaxkv.capacity.plan import Report
from jaxkv.errors import ConfigError


def check_matplotlib() -> None:
    """Raises ConfigError, with the command that helps, if nothing can be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot draws with matplotlib, which is not installed: pip install 'jaxkv[plot]'")


def plot(report: Report, path: str) -> None:
    """Draws tokens a second, and where the time of a step goes, against rows; both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [at.rows for at in report.bounds]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    left.plot(rows, [at.tokens_s for at in report.bounds], marker="o")
    for name in ("memory", "compute", "link"):
        right.plot(rows, [getattr(at.bound, f"{name}_s") * 1e3 for at in report.bounds], label=name)
    left.set(ylabel="tokens/s, upper bound", title="decode speed")
    right.set(ylabel="ms a step", title="what a step waits for")
    right.legend()
    for axes in (left, right):
        axes.set(xlabel="rows at once", xscale="log", yscale="log")
        axes.grid(which="both", alpha=0.3)
    context = report.bounds[0].context_len if report.bounds else 0
    figure.suptitle(
        f"{report.model} on {report.topology}, tensor={report.tensor} data={report.data}, {report.dtype}, "
        f"{context:,} tokens a row"
    )
    figure.savefig(path, dpi=130)
    pyplot.close(figure)

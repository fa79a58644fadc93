"""The results as a picture; needs matplotlib, which the core does not."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from freetoken.serve.bench.results import BenchResult
from freetoken.vocab.errors import UsageError


def check_plot(path: Path) -> None:
    """Raises ``UsageError`` before anything is measured when a plot could not be written afterwards."""
    if find_spec("matplotlib") is None:
        raise UsageError(f"--plot {path}", "matplotlib is not installed", "pip install matplotlib")
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--plot {path}", "the name must end in .png, .svg or .pdf")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--plot {path}", f"there is no folder {path.absolute().parent}")


def write_plot(result: BenchResult, path: Path) -> None:
    """Time to first token by prompt length, first and again; and throughput by streams."""
    import matplotlib  # type: ignore[import-not-found, import-untyped, unused-ignore]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # type: ignore[import-not-found, import-untyped, unused-ignore]

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    _lengths(left, result)
    _load(right, result)
    figure.suptitle(f"{result.model} at {result.url}")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _lengths(axes: Any, result: BenchResult) -> None:
    axes.set(title="time to first token", xlabel="prompt tokens", ylabel="seconds")
    if not result.lengths:
        return
    tokens = [item.prompt_tokens for item in result.lengths]
    axes.plot(tokens, [item.first_s for item in result.lengths], "o--", label="first at that length")
    axes.plot(tokens, [item.again_median_s for item in result.lengths], "o-", label="again, median")
    axes.set(xscale="log", yscale="log")
    axes.legend()


def _load(axes: Any, result: BenchResult) -> None:
    axes.set(title="throughput", xlabel="streams", ylabel="generated tokens a second")
    if result.load:
        axes.plot([item.streams for item in result.load], [item.out_tok_s for item in result.load], "o-")
    axes.set_ylim(bottom=0)

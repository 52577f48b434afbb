"""Hit rate over capacity as a picture; needs the ``plots`` extra."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvoffload.errors import ConfigError
from kvoffload.replay.study import BELADY, INFINITE, Row


def check(path: Path) -> None:
    """Find out now, not after minutes of replaying, whether a picture can be drawn into a file.

    Raises:
        ConfigError: matplotlib is not installed, or the file is no PNG or cannot be written.
    """
    if path.suffix.lower() != ".png":
        raise ConfigError("plot", str(path), "must end in .png")
    if find_spec("matplotlib") is None:
        remedy = "needs its extra: pip install '/path/to/kvoffload[plots]'"
        raise ConfigError("plot", str(path), remedy)
    try:
        existed = path.exists()
        path.open("ab").close()  # asks the file system itself, and leaves a picture as it was
    except OSError as error:
        raise ConfigError("plot", str(path), f"cannot be written: {error.strerror}") from error
    if not existed:
        path.resolve().unlink()  # a link stays, which leads to no file yet


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draw contiguous-prefix hit rates by policy and capacity into a PNG file.

    Raises:
        ConfigError: the file cannot be written.
        ImportError: matplotlib is not installed; see :func:`check`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=100, layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(row.policy for row in rows):
        points = [(row.capacity, 100 * row.hits.prefix_rate) for row in rows if row.policy == name]
        if name == INFINITE:
            axes.axhline(points[0][1], color="0.6", linewidth=1, label="infinite")
        else:
            style: dict[str, Any] = (
                {"color": "0.3", "linestyle": "--"} if name == BELADY else {"marker": "o"}
            )
            axes.plot(*zip(*points, strict=True), label=name, markersize=4, **style)
    axes.set_xscale("log")
    axes.set_xlabel("capacity in blocks")
    axes.set_ylabel("contiguous-prefix hits, % of blocks")
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise ConfigError("plot", str(path), f"cannot be written: {error.strerror}") from error

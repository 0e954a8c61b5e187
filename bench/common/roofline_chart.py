"""A roofline with measured points on it: as text for a terminal, and as a PNG.

Across is the intensity of the work, operations a byte; upwards what it reaches, operations a second; both in powers.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from string import ascii_lowercase
from typing import NamedTuple

from bench.common.roofs import Roof

_COLUMNS, _ROWS = 72, 18
_MARGIN = 2.0  # The chart goes on by this factor on all sides.


class Point(NamedTuple):
    """Something measured."""

    name: str
    intensity: float
    flop_per_s: float


class Frame(NamedTuple):
    """What part of the plane is drawn; all positive."""

    left: float
    right: float
    bottom: float
    top: float

    def column(self, intensity: float) -> int:
        """Of a terminal, from the left."""
        return _place(intensity, self.left, self.right, _COLUMNS)

    def row(self, flop_per_s: float) -> int:
        """Of a terminal, from below."""
        return _place(flop_per_s, self.bottom, self.top, _ROWS)

    def intensity(self, column: int) -> float:
        """In the middle of a column."""
        return float(self.left * (self.right / self.left) ** (column / (_COLUMNS - 1)))


def frame(roof: Roof, points: Sequence[Point]) -> Frame:
    """Room for the ridge and all points."""
    ridge = Point("", roof.flop_per_s / roof.bytes_per_s, roof.flop_per_s)
    across = [point.intensity for point in (*points, ridge)]
    upwards = [point.flop_per_s for point in (*points, ridge)]
    return Frame(min(across) / _MARGIN, max(across) * _MARGIN, min(upwards) / _MARGIN, max(upwards) * _MARGIN)


def text_chart(roof: Roof, points: Sequence[Point]) -> str:
    """The roof as a line, each point as a letter, and what the letters mean with the share of the roof reached."""
    view = frame(roof, points)
    grid = [[" "] * _COLUMNS for _ in range(_ROWS)]
    for column in range(_COLUMNS):
        intensity = view.intensity(column)
        row = view.row(roof.attainable(intensity))
        grid[row][column] = "-" if intensity * roof.bytes_per_s > roof.flop_per_s else "/"
    for letter, point in zip(ascii_lowercase, points, strict=False):
        grid[view.row(point.flop_per_s)][view.column(point.intensity)] = letter
    lines = [
        f"{view.top / 1e9:8.3g} |{''.join(row)}" if not i else f"{'':8} |{''.join(row)}"
        for i, row in enumerate(grid[::-1])
    ]
    lines.append(f"{view.bottom / 1e9:8.3g} +{'-' * _COLUMNS}")
    lines.append(f"{'GFLOP/s':>8}  {view.left:<8.3g}{'FLOP/byte':^{_COLUMNS - 16}}{view.right:>8.3g}")
    lines.append(f"roofs: {roof.bytes_per_s / 1e9:.2f} GB/s, {roof.flop_per_s / 1e9:.1f} GFLOP/s")
    for letter, point in zip(ascii_lowercase, points, strict=False):
        share = point.flop_per_s / roof.attainable(point.intensity)
        lines.append(
            f"  {letter}  {point.name:<28} {point.intensity:8.2f} FLOP/byte {point.flop_per_s / 1e9:8.2f} GFLOP/s"
            f" {share:7.1%} of the roof"
        )
    return "\n".join(lines)


def save_png(roof: Roof, points: Sequence[Point], path: Path) -> bool:
    """Draw it into a file; its directory is made. False = matplotlib is not installed, nothing was written.

    Raises OSError.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    view = frame(roof, points)
    figure = Figure(figsize=(9, 6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    ridge = roof.flop_per_s / roof.bytes_per_s
    across = sorted((view.left, ridge, view.right))
    axes.loglog(across, [roof.attainable(each) / 1e9 for each in across], color="black", linewidth=2)
    for point in points:
        axes.plot(point.intensity, point.flop_per_s / 1e9, "o", label=point.name)
    axes.set_xlim(view.left, view.right)
    axes.set_ylim(view.bottom / 1e9, view.top / 1e9)
    axes.set_xlabel("FLOP / byte")
    axes.set_ylabel("GFLOP / s")
    axes.set_title(f"one thread: {roof.bytes_per_s / 1e9:.1f} GB/s read, {roof.flop_per_s / 1e9:.0f} GFLOP/s")
    axes.grid(True, which="both", alpha=0.2)
    axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return True


def _place(value: float, low: float, high: float, count: int) -> int:
    share = math.log(value / low) / math.log(high / low)
    return min(count - 1, max(0, round(share * (count - 1))))

"""Draw boxes in boxes as SVG, such as the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from omnitrain.page.svg import BACK, TEXT, color, svg_of

_FONT = 8


@dataclass(frozen=True)
class Box:
    """A rectangle with words at its top; of the innermost ones, in the middle.

    Attributes:
        x: left edge.
        y: upper edge.
        width: width.
        height: height.
        words: what it says.
        color: index of its colour; None: a frame without one.
    """

    x: float
    y: float
    width: float
    height: float
    words: str
    color: int | None = None


def draw_boxes(boxes: Sequence[Box], width: float, height: float, name: str, title: str) -> str:
    """Return boxes as SVG; outer ones come first. ``width`` and ``height`` are in inches, like the boxes."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    figure = Figure(figsize=(width, height))
    FigureCanvasSVG(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    for box in boxes:
        is_rank = box.color is not None
        face = color(box.color) if box.color is not None else "none"
        line = BACK if is_rank else TEXT
        axes.add_patch(Rectangle((box.x, box.y), box.width, box.height, facecolor=face, edgecolor=line, linewidth=0.7))
        middle, top = box.y + box.height / 2, box.y + 0.12
        axes.text(
            box.x + (box.width / 2 if is_rank else 0.06),
            middle if is_rank else top,
            box.words,
            color=BACK if is_rank else TEXT,
            fontsize=_FONT,
            ha="center" if is_rank else "left",
            va="center",
        )
    return svg_of(figure, name, escape(title))

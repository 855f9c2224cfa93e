"""Draw the ranks of a mesh, axis by axis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from omnitrain.plan.mesh import DENSE_AXES, MeshShape
from omnitrain.report.html import rendered, tag
from omnitrain.report.svg import BACK, color, picture, words_at

_WIDTH, _HEIGHT = 44, 22  # of a rank
_TITLE, _PAD = 17, 5  # above and around what is inside of a frame
_DRAWN = 64  # ranks of a section; of more, the first ones along the outer axes stand for all
_NAMES = {"sp": "ulysses"}  # the recipe's word for an axis

Axis = tuple[str, int]


def mesh_picture(section: Mapping[str, Any], index: int) -> Markup:
    """Return a picture of a section (of ``layout.json``) as HTML; ``index``: of its first colour."""
    axes: list[Axis] = [(axis, section["axes"][axis]) for axis in DENSE_AXES if section["axes"][axis] > 1]
    drawn, mesh = _cut(axes), MeshShape(**section["axes"], ep=section["ep"])
    experts, stages = mesh.ranks_in("ep"), mesh.ranks_in("pp")

    def boxes(axes_here: Sequence[Axis], rank: int, x: float, y: float) -> Iterator[Markup]:
        """Frames of the outermost axis with what is in them; ``rank``: the first one, counted in the section."""
        if not axes_here:
            yield tag(
                "rect", x=x, y=y, width=_WIDTH, height=_HEIGHT, fill=color(index + int(stages[rank])), stroke=BACK
            )
            words = f"{section['first_rank'] + rank}" + (f", ep {experts[rank]}" if mesh.ep > 1 else "")
            yield words_at(x + _WIDTH / 2, y + _HEIGHT / 2 + 3, words, "middle", fill=BACK)
            return
        (name, size), inner = axes_here[0], axes_here[1:]
        width, height = _framed(inner)
        apart = _count([axis for axis in axes if DENSE_AXES.index(axis[0]) > DENSE_AXES.index(name)])
        for i in range(size):
            left, top = (x + i * width, y) if _is_across(axes_here) else (x, y + i * height)
            frame = {"width": width - _PAD / 2, "height": height - _PAD / 2, "fill": "none", "stroke": "currentColor"}
            yield tag("rect", x=left, y=top, stroke_width=0.7, **frame)
            yield words_at(left + 4, top + 11, f"{_NAMES.get(name, name)} {i}")
            yield from boxes(inner, rank + i * apart, left + _PAD, top + _TITLE)

    width, height = (size + 2 * _PAD for size in _size(drawn))
    title = f"{section['name']}: {mesh} ({', '.join(section['components'])})"
    svg = picture(width, height, title, boxes(drawn, 0, _PAD, _PAD))
    return rendered("mesh.html", title=title, svg=svg, width=width, mesh=mesh, num_drawn=_count(drawn))


def _cut(axes: Sequence[Axis]) -> list[Axis]:
    """Return the axes to draw: without outer ones, and with fewer of the next, where there are too many ranks."""
    for index, (name, size) in enumerate(axes):
        inner = _count(axes[index + 1 :])
        if inner < _DRAWN:
            return [(name, min(size, _DRAWN // inner)), *axes[index + 1 :]]
    return []


def _count(axes: Sequence[Axis]) -> int:
    return MeshShape(**dict(axes)).world_size


def _is_across(axes: Sequence[Axis]) -> bool:
    """Whether the outermost of these axes goes from left to right: stages do, and otherwise axes take turns."""
    return axes[0][0] == "pp" or len(axes) % 2 == 1


def _size(axes: Sequence[Axis]) -> tuple[float, float]:
    """Width and height of everything inside of the outermost axis."""
    if not axes:
        return _WIDTH, _HEIGHT
    width, height = _framed(axes[1:])
    size = axes[0][1]
    return (width * size, height) if _is_across(axes) else (width, height * size)


def _framed(axes: Sequence[Axis]) -> tuple[float, float]:
    width, height = _size(axes)
    return width + 2 * _PAD, height + _PAD + _TITLE

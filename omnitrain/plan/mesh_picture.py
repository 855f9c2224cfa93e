"""Draw the ranks of a mesh, axis by axis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omnitrain.page.boxes import Box, draw_boxes
from omnitrain.page.html import figure, note
from omnitrain.plan.mesh import DENSE_AXES, MeshShape

_WIDTH, _HEIGHT = 0.62, 0.3  # inches of a rank
_TITLE, _PAD = 0.24, 0.07  # inches above and around what is inside of a frame
_DRAWN = 64  # ranks of a section; of more, the first ones along the outer axes stand for all
_NAMES = {"sp": "ulysses"}  # the recipe's word for an axis

Axis = tuple[str, int]


def mesh_picture(section: Mapping[str, Any], index: int, name: str) -> str:
    """Return a picture of ranks as HTML. It needs matplotlib.

    Args:
        section: a section of a layout: ``name``, ``first_rank``, ``components``, ``axes`` (the size of each of
            :data:`~omnitrain.plan.mesh.DENSE_AXES`) and ``ep``.
        index: index of its first colour.
        name: start of the ids in the picture, which no other one has.
    """
    axes: list[Axis] = [(axis, section["axes"][axis]) for axis in DENSE_AXES if section["axes"][axis] > 1]
    drawn, mesh = _cut(axes), MeshShape(**section["axes"], ep=section["ep"])
    title = f"{section['name']}: {mesh} ({', '.join(section['components'])})"
    inside = _size(drawn)
    width, height = (size + 2 * _PAD for size in inside)
    boxes = list(_boxes(drawn, axes, section["first_rank"], (_PAD, _PAD), _Words(mesh, section, index)))
    svg = draw_boxes(boxes, width, height, name, title)
    words = ["Ranks are numbered with the innermost axis fastest."]
    words += ["Ranks of one colour have the same blocks."] if mesh.pp > 1 else []
    if (num_drawn := _count(drawn)) < mesh.world_size:
        words += [f"{num_drawn} of {mesh.world_size} ranks are drawn; the others are like them."]
    return figure(f'<div style="max-width:{1.4 * width:.1f}in">{svg}</div>', title) + note(" ".join(words))


class _Words:
    """What a rank says in the picture, and its colour."""

    def __init__(self, mesh: MeshShape, section: Mapping[str, Any], index: int) -> None:
        self._first, self._index = section["first_rank"], index
        self._experts = mesh.ranks_in("ep") if mesh.ep > 1 else None
        self._stages = mesh.ranks_in("pp")

    def of(self, rank: int) -> tuple[str, int]:
        """Return the words and the colour of a global rank."""
        own = rank - self._first
        experts = f", ep {self._experts[own]}" if self._experts is not None else ""
        return f"{rank}{experts}", self._index + int(self._stages[own])


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


def _boxes(
    axes: Sequence[Axis], every: Sequence[Axis], rank: int, corner: tuple[float, float], words: _Words
) -> Iterator[Box]:
    """Frames of the outermost axis with what is in them. ``every``: axes that number ranks, with their true sizes."""
    x, y = corner
    if not axes:
        yield Box(x, y, _WIDTH, _HEIGHT, *words.of(rank))
        return
    name, size = axes[0]
    inner = [axis for axis in every if DENSE_AXES.index(axis[0]) > DENSE_AXES.index(name)]
    width, height = _framed(axes[1:])
    for index in range(size):
        left, top = (x + index * width, y) if _is_across(axes) else (x, y + index * height)
        yield Box(left, top, width - _PAD / 2, height - _PAD / 2, f"{_NAMES.get(name, name)} {index}")
        start = rank + index * _count(inner)
        yield from _boxes(axes[1:], every, start, (left + _PAD, top + _TITLE), words)

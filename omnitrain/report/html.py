"""Pages of omnitrain: jinja2 templates with numbers, tables, and a style sheet for light and dark.

A page is one file that needs nothing else. All rules of its style are for what is inside of the class ``omnitrain``, so
that a notebook can show a part of a page.
"""

from __future__ import annotations

import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from jinja2 import Environment, PackageLoader
from markupsafe import Markup, escape
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

from omnitrain.errors import UserError
from omnitrain.terminal import as_text

NUM_COLORS = 10
_MARK = '<meta name="generator" content="omnitrain report">'
_CHAPTER = re.compile(r'<section id="([^"]+)"><h2><a[^>]*>([^<]+)')


class Share(float):
    """A number that is shown as a percentage."""


def in_words(cell: Any) -> str:
    """Return what a table shows: of a number at most four digits that count, with thousands apart."""
    if isinstance(cell, Share):
        return f"{cell:.1%}"
    if not isinstance(cell, (int, float)):
        return "" if cell is None else str(cell)
    if cell == int(cell) and abs(cell) < 1e15:
        return f"{int(cell):,}"
    return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.4g}"


def tag(name: str, content: object = "", **attributes: object) -> Markup:
    """Return an element; content and attributes are escaped, and ``_`` in an attribute's name stands for ``-``."""
    given = Markup(" ").join(
        Markup('{}="{}"').format(key.replace("_", "-"), value) for key, value in attributes.items()
    )
    return Markup("<{0} {1}>{2}</{0}>").format(name, given, content)


def table(titles: Sequence[str], rows: Iterable[Sequence[Any]]) -> Markup:
    """Return a table that scrolls by itself; numbers are to the right, with all digits in their ``value``."""
    listed = list(rows)
    firsts = [next((row[i] for row in listed if row[i] is not None), None) for i in range(len(titles))]
    head = Markup("").join(
        Markup("<th{}>{}</th>").format(_kind(first), title) for title, first in zip(titles, firsts, strict=True)
    )
    body = Markup("").join(Markup("<tr>{}</tr>").format(Markup("").join(map(_cell, row))) for row in listed)
    return Markup('<div class="scroll"><table><thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>').format(
        head, body
    )


def _kind(value: Any) -> Markup:
    return Markup(' class="number"' if isinstance(value, (int, float)) else "")


def _cell(value: Any) -> Markup:
    shown: Any = value if isinstance(value, Markup) else in_words(value)
    if isinstance(value, (int, float)):
        shown = Markup('<data value="{}">{}</data>').format(repr(value), shown)
    return Markup("<td{}>{}</td>").format(_kind(value), shown)


def picked(rows: Iterable[Mapping[str, Any]], keys: Sequence[str]) -> list[list[Any]]:
    """Return the cells of a table: these keys of each row; None where a row lacks one."""
    return [[row.get(key) for key in keys] for row in rows]


def swatch(color: int, words: str = "", dash: int = 0) -> Markup:
    """Return a short line in a colour of the figures, and what it stands for."""
    line = Markup('<i class="swatch d{}" style="--c:var(--c{})"></i>').format(dash % 4, color % NUM_COLORS)
    return line + escape(words)


_ENVIRONMENT = Environment(
    loader=PackageLoader("omnitrain.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True
)
_ENVIRONMENT.globals |= {"table": table, "picked": picked, "swatch": swatch, "tag": tag}


def rendered(template: str, **values: Any) -> Markup:
    """Return a template of this package with these values."""
    return Markup(_ENVIRONMENT.get_template(template).render(values))


def part_of_notebook(body: str) -> str:
    """Return HTML as the output of a cell. The rules of its style sheet leave the rest of the notebook alone."""
    return rendered("part.html", body=Markup(body))


def write_page(name: str, kind: str, body: str, output: Path) -> Path:
    """Write a page of ``kind`` about ``name``, and return its file; UserError: it is no page, or not writable."""
    written = time.strftime("%Y-%m-%d %H:%M", time.localtime())
    links = [(anchor, Markup(title)) for anchor, title in _CHAPTER.findall(body)]
    text = rendered(
        "page.html", name=name, kind=kind, body=Markup(body), links=links, written=written, mark=Markup(_MARK)
    )
    try:
        if output.is_file() and _MARK not in output.read_text(encoding="utf-8", errors="replace")[:1000]:
            raise UserError(f"{output} exists and is no report of omnitrain; name another file with --output")
        output.parent.mkdir(parents=True, exist_ok=True)
        unfinished = output.with_name(f"{output.name}.tmp")
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, output)
    except OSError as error:
        raise UserError(f"{output} cannot be written ({error.strerror}); name another file with --output") from None
    return output


_COLUMNS = 120  # of the text


class Shown(ABC):
    """Something that ``print``, a notebook and :meth:`save` show."""

    name: str  # what it is about
    title: ClassVar[str]  # what it is, on a page

    @abstractmethod
    def lines(self) -> Iterable[RenderableType]:
        """Return what a terminal shows."""

    @abstractmethod
    def chapters(self) -> Markup:
        """Return what a page shows."""

    def save(self, file: str | Path) -> Path:
        """Write one page that needs nothing else, and return its path; UserError: the file is something else."""
        return write_page(self.name, self.title, self.chapters(), Path(file))

    def _repr_html_(self) -> str:
        return part_of_notebook(self.chapters())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self.lines()

    def __str__(self) -> str:
        return as_text(self, columns=_COLUMNS)

    __repr__ = __str__

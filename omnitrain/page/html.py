"""The pieces of a page: numbers, tables, figures, chapters. Texts are escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Raw:
    """HTML that is put into the page as it is."""

    text: str


Cell = str | int | float | None | Raw


def text_of(cell: Cell) -> str:
    """Return the HTML of a cell: texts are escaped, and numbers are short, with all digits in their ``value``."""
    if isinstance(cell, Raw):
        return cell.text
    if isinstance(cell, (int, float)):
        return f'<data value="{cell!r}">{number(cell)}</data>'
    return "" if cell is None else escape(cell)


def number(value: float) -> str:
    """Return a number with at most four digits that count, and thousands apart."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def table(titles: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """Return a table that scrolls by itself where the page is narrow. Numbers are to the right."""
    listed = list(rows)
    kinds = [_kind(next((row[i] for row in listed if row[i] is not None), None)) for i in range(len(titles))]
    head = "".join(f"<th{kind}>{escape(title)}</th>" for title, kind in zip(titles, kinds, strict=True))
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in listed)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def figure(svg: str, title: str, *, is_wide: bool = False) -> str:
    """Return a picture with its title."""
    kind = ' class="wide"' if is_wide else ""
    return f"<figure{kind}><figcaption>{escape(title)}</figcaption>{svg}</figure>"


def swatch(color: int, dash: int = 0) -> str:
    """Return a short line in a colour of the figures, which stands for a curve in a table."""
    return f'<i class="swatch d{dash % 4}" style="--c:var(--c{color})"></i>'


def note(words: str) -> str:
    """Return a paragraph in smaller letters."""
    return f'<p class="note">{escape(words)}</p>'


def heading(words: str) -> str:
    """Return a heading inside of a chapter."""
    return f"<h3>{escape(words)}</h3>"


def chapter(anchor: str, title: str, parts: Iterable[str]) -> str:
    """Return a chapter of the page with a heading that links to it."""
    link = f'<h2><a href="#{anchor}">{escape(title)}</a></h2>'
    return f'<section id="{anchor}">{link}{"".join(parts)}</section>'


def _cell(cell: Cell) -> str:
    return f"<td{_kind(cell)}>{text_of(cell)}</td>"


def _kind(cell: Cell) -> str:
    return ' class="number"' if isinstance(cell, (int, float)) else ""

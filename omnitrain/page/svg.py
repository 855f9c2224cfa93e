"""Turn figures of matplotlib into SVG for a page: colours follow the page's theme, and nothing clashes with others.

Figures are drawn in :data:`TEXT`, :data:`GRID` and :func:`color`, which stand for colours of the page.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUM_COLORS = 10
TEXT, GRID, BACK = "#000001", "#000002", "#000003"
_VARIABLES = {TEXT: "currentColor", GRID: "var(--line)", BACK: "var(--back)"} | {
    f"#0001{index:02x}": f"var(--c{index})" for index in range(NUM_COLORS)
}
_KNOWN = re.compile("|".join(_VARIABLES))
_ID = re.compile(r' id="([^"]+)"')
_START = re.compile(r'<svg [^>]*viewBox="([^"]+)"[^>]*>')
_ATTRIBUTE = re.compile(r'="[^"]*"')  # coordinates are in attributes; texts stay as they are
_NUMBER = re.compile(r"\d+\.\d{2,}")


def color(index: int) -> str:
    """Return the colour that stands for the ``index``-th one of the page; they repeat."""
    return f"#0001{index % NUM_COLORS:02x}"


def svg_of(figure: Figure, name: str, title: str) -> str:
    """Return a figure as an ``<svg>`` element.

    Args:
        figure: drawn in the colours of this module.
        name: start of the ids in it, which no other figure of the page has.
        title: what the figure shows, for readers who cannot see it.
    """
    import matplotlib

    stream = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "path.simplify": True}):
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(stream, format="svg", transparent=True, metadata=nothing)
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<style type=.*?</style>", "", text, flags=re.DOTALL)  # it would hold for the whole page
    text = re.sub(r" font-family: [^;\"]+;?", " ", text)
    text = re.sub(
        r"""<svg [^>]*viewBox="([^"]+)"[^>]*>""", rf'<svg viewBox="\1" role="img" aria-label="{title}">', text
    )
    text = _KNOWN.sub(lambda found: _VARIABLES[found[0]], text)
    text = _ATTRIBUTE.sub(lambda found: _NUMBER.sub(lambda number: f"{float(number[0]):.1f}", found[0]), text)
    text = re.sub(r"\s*\n\s*", " ", text).replace("xlink:href", "href")
    return _with_own_ids(text, name).replace("> <", "><")


def _with_own_ids(text: str, name: str) -> str:
    """Keep the ids that something refers to, with ``name`` before them."""
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', text))
    text = _ID.sub(lambda found: f' id="{name}-{found[1]}"' if found[1] in used else "", text)
    return re.sub(r'(href="|url\()#', rf"\1#{name}-", text)

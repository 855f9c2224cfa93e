"""Put chapters into one page that needs nothing else, or into a part of a notebook."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Sequence
from html import escape

from omnitrain.page.theme import PAGE_STYLE, PART_STYLE, SCRIPT, STYLE

MARK = '<meta name="generator" content="omnitrain report">'
_TITLE = re.compile(r'<section id="([^"]+)"><h2><a[^>]*>([^<]+)')


def own_prefix() -> str:
    """Return the start of the names of figures that no other output of a notebook has."""
    return f"p{uuid.uuid4().hex[:8]}-"


def part_of_notebook(chapters: Sequence[str]) -> str:
    """Return chapters as the output of a cell. The rules of its style sheet leave the rest of the notebook alone."""
    return f'<style>{STYLE}{PART_STYLE}</style><div class="omnitrain">{"".join(chapters)}</div>'


def whole_page(name: str, kind: str, chapters: Sequence[str]) -> str:
    """Return a page that needs nothing else, as HTML.

    Args:
        name: what it is about.
        kind: what it is, such as ``report``.
        chapters: made with :func:`~omnitrain.page.html.chapter`.
    """
    found = [_TITLE.match(chapter) for chapter in chapters]
    links = "".join(f'<a href="#{one[1]}">{one[2]}</a>' for one in found if one is not None)
    written = time.strftime("%Y-%m-%d %H:%M", time.localtime())
    return f"""<!doctype html>
<html lang="en" class="omnitrain">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
{MARK}
<link rel="icon" href="data:,">
<title>{escape(name)}: {kind}</title>
<style>{STYLE}{PAGE_STYLE}</style>
</head>
<body>
<header><button type="button">light / dark</button><h1>{escape(name)}</h1>
<p class="note">{kind.capitalize()} of omnitrain, written {written}</p><nav>{links}</nav></header>
<main>{"".join(chapters)}</main>
<script>{SCRIPT}</script>
</body>
</html>
"""

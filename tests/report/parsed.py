"""Pages as tests read them."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "link", "img", "br", "path", "rect", "use", "input"}


class Page(HTMLParser):
    """A page: its attributes, the numbers and words of each chapter; tags must be closed in order."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.source = file.read_text()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.numbers: dict[str, list[float]] = {}
        self.words: dict[str, str] = {}
        self.counts: dict[str, int] = {}
        self._chapter = ""
        self.feed(self.source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.open += [] if tag in VOID else [tag]
        self.ids += [found["id"] or ""] if "id" in found else []
        self.links += [str(found[key]) for key in ("src", "href", "xlink:href") if key in found]
        if tag == "section":
            self._chapter = str(found["id"])
            self.numbers[self._chapter], self.words[self._chapter] = [], ""
        if tag == "data":
            self.numbers[self._chapter].append(float(str(found["value"])))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open = self.open[:-1] if tag not in VOID else self.open

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._chapter:
            self.words[self._chapter] += data


def self_contained(file: Path) -> Page:
    """Read a page; whatever it is about, it needs nothing but itself."""
    found = Page(file)
    assert file.stat().st_size < 5_000_000
    assert [link for link in found.links if not link.startswith(("data:", "#"))] == []
    assert set(re.findall(r"url\((.)", found.source)) <= {"#"} and "@import" not in found.source
    assert not re.search(r"https?://", found.source) and not re.search(r"\bnan\b", found.source, re.IGNORECASE)
    assert len(set(found.ids)) == len(found.ids)
    assert [link[1:] for link in found.links if link.startswith("#") and link[1:] not in found.ids] == []
    return found

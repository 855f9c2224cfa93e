"""A page in Chromium, light or dark, with all that it reports."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from playwright.sync_api import Page, sync_playwright

Theme = Literal["light", "dark"]


@dataclass
class Opened:
    """A page that a browser shows; errors of its scripts, and the addresses that it asked for."""

    page: Page
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@contextmanager
def opened(file: Path, theme: Theme, width: int = 1200) -> Iterator[Opened]:
    """Open a file in Chromium (Debian: apt install chromium), and wait until everything is loaded."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    assert program is not None, "no Chromium: apt install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program)
        found = Opened(browser.new_page(color_scheme=theme, viewport={"width": width, "height": 900}))
        found.page.on("pageerror", lambda error: found.errors.append(str(error)))
        found.page.on("console", lambda line: found.errors.append(line.text) if line.type == "error" else None)
        found.page.on("request", lambda request: found.requests.append(request.url))
        found.page.goto(file.absolute().as_uri(), wait_until="load")
        yield found
        browser.close()

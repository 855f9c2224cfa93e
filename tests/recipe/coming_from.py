"""The tables of docs/coming-from.md. ``python -m tests.recipe.coming_from`` writes them again."""

from __future__ import annotations

import re
from pathlib import Path

from omnitrain.recipe.other_names import OF_TRAINERS, Here

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
HEAD = "| their key | here | |\n|---|---|---|\n"
TABLE = re.compile(rf"{re.escape(HEAD)}(?:\|.*\n)*")


def trainers() -> list[str]:
    """The titles of the page's sections with a table, in its order."""
    return list(dict.fromkeys(trainer for names in OF_TRAINERS for trainer in names.split(", ")))


def names_of(trainer: str) -> dict[str, Here]:
    """The names of one trainer, in the order of the code."""
    groups = [names for of, names in OF_TRAINERS.items() if trainer in of.split(", ")]
    return {name: here for names in reversed(groups) for name, here in names.items()}


def table_of(trainer: str) -> str:
    """Its names and ours as a table."""
    rows = []
    for name, (key, remark) in names_of(trainer).items():
        words = remark if key else remark.removeprefix("remove it: ")
        rows.append(f"| `{name}` | {f'`{key}`' if key else 'none'} | {words} |\n")
    return HEAD + "".join(rows)


def with_tables(page: str) -> str:
    """The page with the tables of the code; each follows the heading of its trainer."""
    before, *sections = re.split(r"^(?=## )", page, flags=re.MULTILINE)
    written = []
    for section in sections:
        title = section.split("\n")[0].removeprefix("## ")
        written.append(TABLE.sub(lambda _, of=title: table_of(of), section) if title in trainers() else section)
    return before + "".join(written)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))

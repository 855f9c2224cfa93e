"""What works with which model family of transformers: docs/coverage.json and its table, docs/coverage.md.

    python -m tests.models.coverage                 # families that the JSON lacks for these versions; go on at any time
    python -m tests.models.coverage llama qwen3_vl  # these again
    python -m tests.models.coverage --sample 3      # three families drawn by the date, compared with the JSON

Each family's smallest model that plain transformers runs is trained for one step, and compared with plain transformers.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from functools import partial
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

from omnitrain.errors import UserError
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.verify.coverage import (
    COLUMNS,
    EQUAL,
    FALLBACK,
    NONE,
    REFUSED,
    WRONG,
    Coverage,
    CoverageCell,
    measure,
)
from tests.models.every_family import (
    NO_REFERENCE,
    every_family,
    outcome,
    peaked_model,
    probes_of,
)
from tests.models.every_family import (
    REFUSED as NOT_TRAINED,
)

DOCS = Path(__file__).parents[2] / "docs"
FILE, PAGE, README = DOCS / "coverage.json", DOCS / "coverage.md", DOCS.parent / "README.md"
PACKAGES = ("torch", "transformers")
SECONDS = 120  # of a family
LATE, NOT_YET = "not finished", ""


class LateError(BaseException):
    """The time of a family is over. No test catches it as an error of the model."""


def main() -> None:
    """Measure the families that are asked for; write the JSON after each."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("families", nargs="*", help="families to measure again")
    options.add_argument("--sample", type=int, default=0, help="families to draw by the date and to compare")
    given = options.parse_args()
    saved = json.loads(FILE.read_text()) if FILE.is_file() else {"versions": versions(), "families": {}}
    if given.sample:
        sys.exit(compare(saved["families"], given.sample))
    known = saved["families"] if saved["versions"] == versions() else {}
    lacking = {name: {*COLUMNS} - known.get(name, {"cells": {}})["cells"].keys() for name in every_family()}
    names = given.families or sorted(filter(lacking.get, lacking), key=lambda name: -len(lacking[name]))
    with RankPool(2, preload=["tests.models.every_family"]) as pool:
        for name in names:
            known[name] = measured(name, pool)
            print(name, {column: cell["result"] for column, cell in known[name]["cells"].items()}, flush=True)
            write({family: known[family] for family in sorted(known)})


def write(families: dict[str, Any]) -> None:
    """Write the JSON, its page, and how many families are measured into the first screen."""
    FILE.write_text(json.dumps({"versions": versions(), "families": families}, indent=1) + "\n")
    PAGE.write_text(page(families))
    number = f"{len(families)} of {len(every_family())} measured so far"
    README.write_text(re.sub(r"\d+ of \d+ measured so far", number, README.read_text()))


def versions() -> dict[str, str]:
    """Return the versions that decide what works."""
    return {name: version(name).partition("+")[0] for name in PACKAGES}


def compare(known: dict[str, Any], number: int) -> int:
    """Measure families drawn by the date; return 1 if a cell that was finished differs from the JSON."""
    different: dict[str, Any] = {}
    with RankPool(2, preload=["tests.models.every_family"]) as pool:
        for name in random.Random(date.today().isoformat()).sample(sorted(known), min(number, len(known))):
            found, expected = (of["cells"] for of in (measured(name, pool), known[name]))
            print(name, results(found))
            pairs = {
                name: (cell["result"], expected[name]["result"]) for name, cell in found.items() if name in expected
            }
            wrong = {column: pair for column, pair in pairs.items() if LATE not in pair and pair[0] != pair[1]}
            if wrong:
                different[name] = wrong
    print(f"different from {FILE.name}: {different}" if different else f"as {FILE.name} says")
    return bool(different)


def results(cells: dict[str, dict[str, str]]) -> dict[str, str]:
    """Return the words of a family, without reasons."""
    return {column: cell["result"] for column, cell in cells.items()}


def measured(family: str, pool: RankPool) -> dict[str, Any]:
    """Measure all columns of a family, if its time is enough."""
    began, found = time.perf_counter(), of_one_word(CoverageCell(LATE, f"over {SECONDS} s"), LATE)
    with limit(SECONDS):
        try:
            found = against_transformers(family, pool)
        except UserError as error:
            found = of_one_word(CoverageCell(WRONG, str(error)))
    cells = {name: {"result": cell.result, "why": in_short(cell.why)} for name, cell in found.cells.items()}
    facts = {"date": date.today().isoformat(), "seconds": round(time.perf_counter() - began, 1)}
    return facts | {"components": {name: in_short(how) for name, how in found.components.items()}, "cells": cells}


def against_transformers(family: str, pool: RankPool) -> Coverage:
    """Return what `omnitrain check` measures, with one process compared with plain transformers once more."""
    one = outcome(family)
    if one.verdict in (NOT_TRAINED, NO_REFERENCE):
        return of_one_word(CoverageCell(REFUSED if one.verdict == NOT_TRAINED else NONE, "; ".join(one.facts)))
    found = measure(partial(peaked_model, family), probes_of(family), pool)
    if one.wrong:
        found.cells["one process"] = CoverageCell(WRONG, f"error {max(one.wrong.values()):.1e}")
    return found


def of_one_word(alone: CoverageCell, others: str = NONE) -> Coverage:
    """Return the coverage of a model that one process does not train."""
    return Coverage({}, dict.fromkeys(COLUMNS, CoverageCell(others)) | {"one process": alone})


@contextmanager
def limit(seconds: int) -> Iterator[None]:
    """End what runs in this context after so many seconds."""

    def end(*_: Any) -> None:
        raise LateError

    earlier = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    except LateError:
        pass
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, earlier)


def in_short(text: str) -> str:
    """Return the beginning of a reason, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= 200 else f"{line[:197]}..."


def page(families: dict[str, Any]) -> str:
    """Return the page: how many families have each word, then a row for each family, then the reasons."""
    counts = {column: Counter(word_of(one, column) for one in families.values()) for column in COLUMNS}
    words = (EQUAL, FALLBACK, REFUSED, LATE, WRONG, NONE, NOT_YET)
    lines = [HEAD.format(number=len(families), seconds=SECONDS, **versions())]
    lines += row("", *COLUMNS) + row(*["---"] * (1 + len(COLUMNS)))
    lines += [
        line
        for word in words
        for line in row(word or "not measured yet", *(str(counts[column][word]) for column in COLUMNS))
    ]
    lines += ["", "## Families", "", *row("family", "components", *COLUMNS), *row(*["---"] * (2 + len(COLUMNS)))]
    for family, one in families.items():
        lines += row(f"`{family}`", ", ".join(one["components"]), *(word_of(one, column) for column in COLUMNS))
    lines += ["", "## Reasons", ""]
    reasons = sorted((cell["why"], column, name) for name, column, cell in said(families))
    for why, group in groupby(reasons, lambda one: one[0]):
        where = [f"`{family}` ({column})" for _, column, family in group]
        lines.append(f"- {', '.join(where[:6])}{f' and {len(where) - 6} more' * (len(where) > 6)}: {plain(why)}")
    return "\n".join(lines) + "\n"


def word_of(family: dict[str, Any], column: str) -> str:
    """Return the word of a cell."""
    found: str = family["cells"].get(column, {"result": NOT_YET})["result"]
    return found


HEAD = """# Model coverage

Generated by `make families`; [coverage.json](coverage.json) has the dates, seconds and reasons. {number} families of
transformers {transformers} were measured so far, with torch {torch}, on a CPU; `make families` goes on with the others.
`omnitrain check ORG/NAME` prints the same cells of your model.

From each family's config classes, the smallest model is made that plain transformers runs on text. In one process its
step is compared with that of plain transformers: the loss and every gradient. Under a layout it is compared with one
process, as `omnitrain verify` does.

- **equal**: as in plain transformers; under a layout: as in one process, up to rounding.
- **fallback**: equal, with a reason below: samples, items or some modules run one at a time, all tokens are computed, a
  medium is read in the model's own forward or refused, the loss is the model's own, or some cuts of a pipeline are
  refused.
- **refused**: an error in words says why, before a step. **not finished**: over {seconds} seconds. **-**: nothing to
  compare: no small model of the family runs in plain transformers, it does not train in one process, or has no experts.

"One process" is packed training, "loss" the loss in chunks without all logits. "Pipeline" is every cut into stages,
"export" the files of the weights, which plain transformers reads to the bit. The layouts are two ranks: `dp2`, `tp2`,
`sp2`, `dp2.ep2`, `dp2.bf16`, and `dp2` with LoRA adapters of all linear layers.
"""


def row(*cells: str) -> list[str]:
    """Return a row of a table."""
    return [f"| {' | '.join(cells)} |"]


def said(families: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield the cells that have a reason."""
    for family, one in families.items():
        for column, cell in one["cells"].items():
            if cell.get("why") and cell["result"] != EQUAL:
                yield family, column, cell


def plain(text: str) -> str:
    """Return text in which nothing is a link, a tag or a table of Markdown."""
    return text.replace("|", "/").replace("<", "&lt;").replace("[", "(").replace("]", ")")


if __name__ == "__main__":
    main()

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
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

from omnitrain.errors import UserError
from omnitrain.ops.experts.weights import experts_in
from omnitrain.parallel.spawn.pool import RankError, RankPool
from tests.models.every_family import (
    NO_REFERENCE,
    PARTLY,
    REFUSED,
    UNPACKED,
    Ranked,
    _pair,
    every_family,
    in_low_precision,
    in_stages,
    on_ranks,
    outcome,
)

DOCS = Path(__file__).parents[2] / "docs"
FILE, PAGE = DOCS / "coverage.json", DOCS / "coverage.md"
PACKAGES = ("torch", "transformers")
SECONDS = 120  # of a family
LAYOUTS = {"FSDP": "dp2", "tensor parallel": "tp2", "Ulysses": "sp2", "experts": "dp2.ep2"}
COLUMNS = ("one process", "loss", *LAYOUTS, "pipeline", "bf16")
EQUAL, FALLBACK, NONE, WRONG, LATE = "equal", "fallback", "-", "wrong", "not finished"

Cell = dict[str, str]  # "result" and, unless it is equal, "why"


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
    names = given.families or [name for name in every_family() if name not in known]
    with RankPool(2, preload=["tests.models.every_family"]) as pool:
        for name in names:
            known[name] = measured(name, pool)
            print(name, {column: cell["result"] for column, cell in known[name]["cells"].items()}, flush=True)
            ordered = {family: known[family] for family in sorted(known)}
            FILE.write_text(json.dumps({"versions": versions(), "families": ordered}, indent=1) + "\n")
            PAGE.write_text(page(ordered))


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
            pairs = {column: (cell["result"], expected[column]["result"]) for column, cell in found.items()}
            wrong = {column: pair for column, pair in pairs.items() if LATE not in pair and pair[0] != pair[1]}
            if wrong:
                different[name] = wrong
    print(f"different from {FILE.name}: {different}" if different else f"as {FILE.name} says")
    return bool(different)


def results(cells: dict[str, Cell]) -> dict[str, str]:
    """Return the words of a family, without reasons."""
    return {column: cell["result"] for column, cell in cells.items()}


def measured(family: str, pool: RankPool) -> dict[str, Any]:
    """Measure all columns of a family, as far as its time reaches."""
    began, components, cells = time.perf_counter(), {}, {}
    with limit(SECONDS):
        cells["one process"], cells["loss"], components = alone(family)
        if cells["one process"]["result"] in (EQUAL, FALLBACK):
            has_experts = any(True for _ in experts_in(_pair(family).ours))
            for column, layout in LAYOUTS.items():
                if column == "experts" and not has_experts:
                    cells[column] = {"result": NONE, "why": ""}
                    continue
                cells[column] = attempted(lambda layout=layout: ranked(on_ranks(family, layout, pool)))
            cells["pipeline"] = attempted(lambda: staged(family))
            cells["bf16"] = attempted(lambda: ranked(low_precision(family, pool)))
    ended = {"result": LATE, "why": f"over {SECONDS} s"} if len(cells) > 2 or not cells else {"result": NONE, "why": ""}
    cells |= {column: ended for column in COLUMNS if column not in cells}
    facts = {"date": date.today().isoformat(), "seconds": round(time.perf_counter() - began, 1)}
    return facts | {"components": components, "cells": cells}


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


def attempted(measure: Callable[[], Cell]) -> Cell:
    """Return a cell, also where ranks failed."""
    try:
        return measure()
    except (RankError, UserError) as error:
        return {"result": WRONG, "why": in_short(str(error))}


def alone(family: str) -> tuple[Cell, Cell, dict[str, str]]:
    """Return what one process does, its loss, and component -> how its media are read."""
    found = outcome(family)
    if found.verdict in (REFUSED, NO_REFERENCE):
        word = "refused" if found.verdict == REFUSED else NONE
        return {"result": word, "why": in_short("; ".join(found.facts))}, {"result": NONE, "why": ""}, {}
    runner = _pair(family).ours.runner
    native, findings = runner.native, {one.check: one for one in runner.contract.findings}
    falls_back = any(one.outcome == "fallback" for one in findings.values()) or found.verdict in (UNPACKED, PARTLY)
    word, head = WRONG if found.wrong else FALLBACK if falls_back else EQUAL, findings["head"]
    loss = {"result": EQUAL if head.outcome == "passed" else FALLBACK, "why": in_short(head.fact)}
    components: dict[str, str] = dict.fromkeys(native.components, "own component")
    components |= dict.fromkeys(native.in_forward, "in the model's own forward")
    components |= {modality: f"refused: {in_short(str(why))}" for modality, why in native.refused.items()}
    return {"result": word, "why": in_short("; ".join(found.facts))}, loss, components


def ranked(found: Ranked | None) -> Cell:
    """Return the cell of a layout on two ranks."""
    if found is None:
        return {"result": NONE, "why": ""}
    if found.refusal:
        return {"result": "refused", "why": in_short(found.refusal)}
    wrong = max(found.wrong.values(), default=0.0)
    return {"result": WRONG if found.wrong else EQUAL, "why": f"error {wrong:.1e}" if found.wrong else ""}


def low_precision(family: str, pool: RankPool) -> Ranked | None:
    """Return what bf16 on two ranks does, or why one process is refused."""
    found = in_low_precision(family, pool, ["dp2.bf16"])
    return found and found.get("dp2.bf16", found.get("one process"))


def staged(family: str) -> Cell:
    """Return the cell of pipeline stages: equal if every cut is."""
    found = in_stages(family)
    if found is None or found.refusal:
        return {"result": NONE if found is None else "refused", "why": in_short(found.refusal if found else "")}
    if found.verdict == "wrong":
        return {"result": WRONG, "why": f"error {max(found.wrong.values()):.1e}"}
    refused = f"cuts refused before block {', '.join(map(str, found.refused))}" if found.refused else ""
    return {"result": FALLBACK if refused else EQUAL, "why": refused}


def in_short(text: str) -> str:
    """Return the beginning of a reason, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= 200 else f"{line[:197]}..."


def page(families: dict[str, Any]) -> str:
    """Return the page: how many families have each word, then a row for each family, then the reasons."""
    counts = {column: Counter(one["cells"][column]["result"] for one in families.values()) for column in COLUMNS}
    words = (EQUAL, FALLBACK, "refused", LATE, WRONG, NONE)
    lines = [HEAD.format(number=len(families), seconds=SECONDS, **versions())]
    lines += row("", *COLUMNS) + row(*["---"] * (1 + len(COLUMNS)))
    lines += [line for word in words for line in row(word, *(str(counts[column][word]) for column in COLUMNS))]
    lines += ["", "## Families", "", *row("family", "components", *COLUMNS), *row(*["---"] * (2 + len(COLUMNS)))]
    for family, one in families.items():
        lines += row(f"`{family}`", ", ".join(one["components"]), *results(one["cells"]).values())
    lines += ["", "## Reasons", ""]
    reasons = sorted((cell["why"], column, name) for name, column, cell in said(families))
    for why, group in groupby(reasons, lambda one: one[0]):
        where = [f"`{family}` ({column})" for _, column, family in group]
        lines.append(f"- {', '.join(where[:6])}{f' and {len(where) - 6} more' * (len(where) > 6)}: {plain(why)}")
    return "\n".join(lines) + "\n"


HEAD = """# Model coverage

Generated by `make families`; [coverage.json](coverage.json) has the dates, seconds and reasons. {number} families of
transformers {transformers} were measured so far, with torch {torch}, on a CPU; `make families` goes on with the others.
From each family's config classes, the smallest model is made
that plain transformers runs on text. It trains one step here and in plain transformers, and the loss and every gradient
are compared.

- **equal**: as in plain transformers; under a layout: as in one process, up to rounding.
- **fallback**: equal, with a reason below: samples, items or some modules run one at a time, all tokens are computed, a
  medium is read in the model's own forward or refused, the loss is the model's own or leaves out a term of
  transformers, or some cuts of a pipeline are refused.
- **refused**: an error in words says why, before a step. **not finished**: over {seconds} seconds. **-**: nothing to
  compare: no small model of the family runs in plain transformers, it does not train in one process, or has no experts.

"One process" is packed training, "loss" the loss in chunks without all logits. The layouts are two ranks: `dp2`, `tp2`,
`sp2`, `dp2.ep2`, pipeline stages at every cut, and `dp2.bf16`. `omnitrain check ORG/NAME` tests your model.
"""


def row(*cells: str) -> list[str]:
    """Return a row of a table."""
    return [f"| {' | '.join(cells)} |"]


def said(families: dict[str, Any]) -> Iterator[tuple[str, str, Cell]]:
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

"""Model families in bf16: against plain transformers in bf16, and on two ranks.

``-k`` picks families: ``pytest -m slow tests/models/test_low_precision.py -k "gemma3 or qwen3_vl"``.
"""

from __future__ import annotations

from collections import Counter

import pytest

from omnitrain.parallel.spawn.pool import RankPool
from tests.models.every_family import every_family, in_low_precision

pytestmark = pytest.mark.slow

FOUND: Counter[str] = Counter()  # "one process", a layout or "transformers", and what became of it -> families


@pytest.mark.parametrize("family", every_family())
def test_a_family_in_bf16_differs_by_rounding_or_is_refused(ranks: RankPool, family: str) -> None:
    found = in_low_precision(family, ranks) or {}
    for where, one in found.items():
        FOUND[f"{where}: {'refused' if one.refusal else 'wrong' if one.wrong else 'equal'}"] += 1
    assert {where: one.wrong for where, one in found.items() if one.wrong} == {}


def test_what_families_do_in_bf16_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """Counts the tests above; alone it fails."""
    with capsys.disabled():
        print(f"\nin bf16: {dict(FOUND)}")
    assert FOUND["transformers: equal"] >= 60 and FOUND["dp2.bf16: equal"] >= 60

"""Layouts whose AdamW keeps 8-bit moments; `make test-low-bit` installs torchao for these."""

from __future__ import annotations

import pytest

from omnitrain.parallel.spawn.pool import RankPool
from tests.parallel.random_layouts.compare import compare
from tests.parallel.random_layouts.rows import Row, draw

pytestmark = pytest.mark.slow


def rows() -> list[Row]:
    drawn = [row for row in draw(seed=8, number=60, optimizers=["int8"]) if row.parsed.num_ranks <= 4]
    return [row for row in drawn if row.precision == "fp32" and "offload" not in row.layout][:15]


@pytest.mark.parametrize("row", rows(), ids=str)
def test_a_layout_with_8_bit_moments_trains_as_plain_transformers(ranks: RankPool, row: Row) -> None:
    found = compare(ranks, row)
    assert found.status == "equal", found

"""What the tests of sections share."""

from __future__ import annotations

from copy import copy

import pytest

from omnitrain.parallel.spawn.pool import RankPool


@pytest.fixture(scope="session")
def sections(ranks: RankPool) -> RankPool:
    """Up to eight ranks, of which four are those of all tests; each starts when a test needs it."""
    more = copy(ranks)
    more.nproc = 8
    return more

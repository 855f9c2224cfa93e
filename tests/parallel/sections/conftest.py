"""What the tests of sections share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from omnitrain.parallel.spawn.pool import RankPool


@pytest.fixture(scope="session")
def sections(_rank_server: None) -> Iterator[RankPool]:
    """Up to eight ranks; each starts when a test needs it."""
    with RankPool(8) as pool:
        yield pool

"""What all tests share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from multiprocessing import forkserver
from typing import Any

import pytest
import torch

from omnitrain.parallel.ranks import RankPool

torch.set_num_threads(1)  # with more, a row's last bits depend on the rows beside it

_POOLS: list[RankPool] = []
_POOL_LINES: list[str] = []
_PRELOAD = ["omnitrain.train.trainer", "tests.tiny", "pytest"]  # what ranks of most tests import


@pytest.fixture(scope="session", autouse=True)
def _rank_server(request: pytest.FixtureRequest, _own_cache: None) -> None:
    """The process that forks ranks imports beside the first tests; a benchmark would start one that imports less."""
    if sys.platform == "linux" and any("ranks" in item.fixturenames for item in request.session.items):
        forkserver.set_forkserver_preload(_PRELOAD)
        forkserver.ensure_running()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Contracts are checked anew, once for all workers, and the user's cache is left alone."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # what a worker has lies beside what the others have
        folder = folder.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield


@pytest.fixture(scope="session")
def ranks(_rank_server: None) -> Iterator[RankPool]:
    """Up to four ranks, started by the first test that runs something on them."""
    with RankPool(4, preload=_PRELOAD) as pool:
        _POOLS.append(pool)
        yield pool


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several workers (``-n 2 --dist loadgroup``), one has all tests that need ranks, so that there is one pool.

    The other tests of a file stay together, with what they share.
    """
    for item in items:
        group = "ranks" if "ranks" in getattr(item, "fixturenames", ()) else item.location[0]
        item.add_marker(pytest.mark.xdist_group(group))


def pytest_sessionfinish(session: pytest.Session) -> None:
    for pool in _POOLS:
        starts = f"{pool.num_starts} starts of ranks in {pool.start_seconds:.1f} s"
        _POOL_LINES.append(f"rank pool: {starts}, {pool.num_calls} calls in {pool.call_seconds:.1f} s")
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["rank pools"] = _POOL_LINES


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Of xdist: a worker has ended."""
    _POOL_LINES.extend(getattr(node, "workeroutput", {}).get("rank pools", ()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in _POOL_LINES:
        terminalreporter.write_line(line)

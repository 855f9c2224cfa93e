"""What all tests share."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from omnitrain.parallel.spawn import pool as spawned
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.state import leave_process_groups
from tests import device_thread
from tests.forked import Forked
from tests.side_by_side import CACHE

# No test needs a name server. torch's store asks for the name of each address that connects, on both sides, one after
# the other; a name server that does not answer costs 5 s or more each time, and a run of two ranks asks 15 times.
os.environ["RES_OPTIONS"] = "attempts:0"
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # without its warnings about these names
torch.set_num_threads(1)  # with more, a row's last bits depend on the rows beside it

_POOL_NAMES = {"ranks", "sections", "fresh_rank", "forked"}  # fixtures
_POOLS: list[RankPool] = []
# What ranks of most tests import.
_PRELOAD = ["tests.device_thread", "omnitrain.train.trainer", "tests.tiny", "pytest", "tests.frozen"]


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "run backwards in a worker thread of autograd, as on a GPU (tests/device_thread.py)"
    parser.addoption("--device-thread", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    if "COVERAGE_PROCESS_CONFIG" in os.environ:
        spawned._kill = _end
    if config.getoption("device_thread"):
        os.environ[device_thread.ASKED] = "1"
        device_thread.install()


def _end(process: BaseProcess, connection: Connection) -> None:
    """End a rank as the end of the pool's process does: it saves what it covered, which a killed one cannot."""
    connection.close()
    process.join(30)
    process.kill()
    process.join()


@pytest.fixture(scope="session", autouse=True)
def _rank_server(request: pytest.FixtureRequest, _own_cache: None) -> None:
    """The process that forks ranks imports beside the first tests; a benchmark would start one that imports less."""
    has_pool = any(_POOL_NAMES.intersection(item.fixturenames) for item in request.session.items)
    if sys.platform == "linux" and (has_pool or request.config.getoption("device_thread")):
        forkserver.set_forkserver_preload(_PRELOAD)
        forkserver.ensure_running()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Contracts are checked anew, once for all sessions, and the user's cache is left alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", os.environ.get(CACHE) or str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def ranks(_rank_server: None) -> Iterator[RankPool]:
    """Up to four ranks, started by the first test that runs something on them."""
    with RankPool(4, preload=_PRELOAD) as pool:
        _POOLS.append(pool)
        yield pool


@pytest.fixture
def fresh_rank(_rank_server: None) -> Iterator[RankPool]:
    """One rank that has run no backward; the first one starts the threads of autograd."""
    with RankPool(1, preload=_PRELOAD) as pool:
        yield pool


@pytest.fixture
def forked(_rank_server: None) -> Iterator[Callable[..., Forked]]:
    """Starts a function in a process of its own that prints into a file, and ends it with the test."""
    started: list[Forked] = []

    def start(printed: Path, function: Callable[..., Any], *arguments: Any) -> Forked:
        started.append(Forked(printed, function, *arguments))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()


@pytest.fixture(scope="module", autouse=True)
def _no_group_is_left() -> Iterator[None]:
    """A module whose tests made a process group in this process leaves it: tests of later ones count on none."""
    yield
    if dist.is_initialized():
        leave_process_groups()


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if _POOL_NAMES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("ranks")
        if item.get_closest_marker("second"):
            item.add_marker("slow")
        for mark in item.iter_markers("gpu"):
            needed, found = mark.args[0] if mark.args else 1, torch.cuda.device_count()
            if found < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs GPUs: {needed}; found {found}"))
    if not config.getoption("device_thread"):
        only = [item for item in items if item.get_closest_marker("device_thread")]
        items[:] = [item for item in items if item not in only]
        config.hook.pytest_deselected(items=only)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # no test looks for garbage in what all tests have imported


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for pool in _POOLS:
        starts = f"{pool.num_starts} starts of ranks in {pool.start_seconds:.1f} s"
        terminalreporter.write_line(f"rank pool: {starts}, {pool.num_calls} calls in {pool.call_seconds:.1f} s")

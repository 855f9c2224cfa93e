import threading
from collections.abc import Generator

import pytest

from omnitrain.data.ahead import run_ahead


def count(closed: list[bool], fail_at: int | None = None, stop: int = 1000) -> Generator[int, None, None]:
    try:
        for number in range(stop):
            if number == fail_at:
                raise ValueError(f"at {number}")
            yield number
    finally:
        closed.append(True)


def test_the_same_items_in_the_same_order_and_an_end() -> None:
    assert list(run_ahead(count([], stop=50), depth=3)) == list(range(50))
    assert list(run_ahead(count([], stop=0), depth=3)) == []


def test_an_error_arrives_in_its_place() -> None:
    items = run_ahead(count([], fail_at=5), depth=3)
    assert [next(items) for _ in range(5)] == list(range(5))
    with pytest.raises(ValueError, match="at 5"):
        next(items)


def test_closing_closes_the_source_and_ends_the_thread() -> None:
    closed: list[bool] = []
    items = run_ahead(count(closed), depth=2)
    assert [next(items), next(items)] == [0, 1]
    items.close()
    assert closed == [True]
    assert not [thread for thread in threading.enumerate() if thread.name == "run_ahead"]

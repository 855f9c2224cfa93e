import functools
import multiprocessing
import time
from collections.abc import Generator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from omnitrain.data.loading.data_process import run_ahead
from omnitrain.errors import DataError, TrainingError


def count(stop: int, closed: Path | None = None, error: Exception | None = None) -> Generator[int, None, None]:
    try:
        yield from range(stop)
        if error is not None:
            raise error
    finally:
        if closed is not None:
            closed.touch()


def tensors() -> Generator[dict[str, torch.Tensor], None, None]:
    yield {"ids": torch.arange(6).view(2, 3), "none": torch.zeros(0), "scalar": torch.tensor(1.5)}


def running() -> list[str]:
    return [process.name for process in multiprocessing.active_children() if process.name == "run_ahead"]


def test_the_same_items_in_the_same_order_and_an_end() -> None:
    assert list(run_ahead(functools.partial(count, 50), depth=3)) == list(range(50))
    assert list(run_ahead(functools.partial(count, 0), depth=3)) == []
    assert running() == []


def test_tensors_arrive_as_they_left_and_can_be_written() -> None:
    (sent,), (received,) = list(tensors()), list(run_ahead(tensors, depth=1))
    for name, tensor in sent.items():
        assert torch.equal(received[name], tensor) and received[name].dtype == tensor.dtype
        received[name].fill_(2)


def test_a_mistake_of_the_user_arrives_in_its_place_as_it_is() -> None:
    items = run_ahead(functools.partial(count, 5, error=DataError("no such column")), depth=3)
    assert [next(items) for _ in range(5)] == list(range(5))
    with pytest.raises(DataError, match=r"^no such column$"):
        next(items)


def test_any_other_error_arrives_with_its_traceback() -> None:
    with pytest.raises(TrainingError, match=r"(?s)in the data process:\nTraceback.*in count.*ZeroDivisionError: zero"):
        list(run_ahead(functools.partial(count, 0, error=ZeroDivisionError("zero")), depth=3))


def test_closing_closes_the_generator_and_ends_the_process(tmp_path: Path) -> None:
    items = run_ahead(functools.partial(count, 10**9, tmp_path / "closed"), depth=2)
    assert [next(items), next(items)] == [0, 1]
    items.close()
    assert (tmp_path / "closed").is_file() and running() == []


def test_two_at_a_time_close_in_any_order() -> None:
    first, second = (run_ahead(functools.partial(count, 10**9), depth=2) for _ in range(2))
    assert next(first) == next(second) == 0
    first.close()
    assert next(second) == 1
    second.close()


def consume_one(started: Connection, seconds: float) -> None:
    items = run_ahead(functools.partial(count, 10**9), depth=2)
    started.send(next(items))
    time.sleep(seconds)


@pytest.mark.parametrize("is_killed", [True, False])
def test_the_process_ends_with_its_consumer_however_that_ends(is_killed: bool) -> None:
    alive, held_by_both = multiprocessing.Pipe(duplex=False)
    consumer = multiprocessing.Process(target=consume_one, args=(held_by_both, 60 if is_killed else 0))
    consumer.start()
    held_by_both.close()
    assert alive.recv() == 0
    if is_killed:
        consumer.kill()
    consumer.join(timeout=10)
    assert alive.poll(timeout=10)
    with pytest.raises(EOFError):  # nobody is left who could write
        alive.recv()

"""A generator that runs ahead of its consumer, in a thread."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")

_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class _Ended:
    error: BaseException | None


def run_ahead(items: Generator[Item, None, None], depth: int) -> Generator[Item, None, None]:
    """The items of a generator, made up to ``depth`` ahead while the consumer works.

    The first item is made in the calling thread: worker processes that ``items`` starts are forked from there, where
    no other thread can hold a lock. Closing the result closes ``items``; an error in ``items`` arrives in its place.

    Args:
        items: advanced by one thread at a time.
        depth: items that wait at the most.
    """
    try:
        first = next(items)
    except StopIteration:
        return
    waiting: queue.Queue[Item | _Ended] = queue.Queue(maxsize=depth)
    stopped = threading.Event()

    def put(item: Item | _Ended) -> None:
        while not stopped.is_set():
            with contextlib.suppress(queue.Full):
                waiting.put(item, timeout=_POLL_SECONDS)
                return

    def produce() -> None:
        error: BaseException | None = None
        with contextlib.closing(items):
            try:
                while not stopped.is_set():
                    put(next(items))
            except StopIteration:
                pass
            except BaseException as caught:
                error = caught
        put(_Ended(error))

    producer = threading.Thread(target=produce, name="run_ahead", daemon=True)
    producer.start()
    try:
        yield first
        while not isinstance(item := waiting.get(), _Ended):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        stopped.set()
        producer.join()

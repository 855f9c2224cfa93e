"""The number of chunks of a model's experts, where its plan leaves that to measurement.

Any number gives the same bits, so the first steps of a run are the measurement: each takes another number, in turn, and
the number whose steps took the least time stays.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median

from omnitrain.models.omni import OmniModel
from omnitrain.models.peers import Peers
from omnitrain.ops.experts import settings_of
from omnitrain.parallel.applied import layout_of
from omnitrain.parallel.expert_exchange import RankDispatcher
from omnitrain.parallel.experts import expert_layers
from omnitrain.parallel.token_shares import ShareOfTokens
from omnitrain.recipe.parallel import AUTO_CHUNKS

ROUNDS = 3
_WARM_UP = 1  # steps in which memory is allocated and kernels are loaded


def candidates(fewest: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to the fewest experts that a rank has of a layer."""
    return tuple(2**power for power in range(fewest.bit_length()))


def fastest(numbers: Sequence[int], seconds: Sequence[Sequence[float]]) -> int:
    """The number whose steps took the least time.

    Args:
        numbers: of chunks, that were taken in turn.
        seconds: of each rank, those of each step per token. A step takes as long as its slowest rank.

    Returns:
        That with the least median; of several, the smallest.
    """
    slowest = [max(of_ranks) for of_ranks in zip(*seconds, strict=True)]
    return min(numbers, key=lambda number: (median(slowest[numbers.index(number) :: len(numbers)]), number))


class ExpertChunks:
    """Measures, and then leaves it at the number that was found.

    Args:
        model: laid out, or on one process.
        settled: what an earlier start of the run found. It is measured again where ranks have fewer experts now.

    Attributes:
        settled: the number that was found; None: none, or none yet.
    """

    def __init__(self, model: OmniModel, settled: int | None = None) -> None:
        own = dict(_measured_layers(model))
        self._dispatchers = list(own)
        fewest = min(own.values(), default=0)
        self._numbers = candidates(fewest)
        self._seconds: list[float] = []
        self._steps = -_WARM_UP
        self.settled: int | None = None
        if settled is not None and (not own or settled <= fewest):
            self._settle(settled)

    @contextmanager
    def measured(self, tokens: int, peers: Peers) -> Iterator[None]:
        """A step over so many tokens of all ranks; each of them calls this, and what one raises ends the run."""
        if self.settled is not None or not self._dispatchers:
            yield
            return
        self._use(self._numbers[max(self._steps, 0) % len(self._numbers)])
        started = time.perf_counter()
        yield
        if self._steps >= 0:
            self._seconds.append((time.perf_counter() - started) / max(tokens, 1))
        self._steps += 1
        if self._steps == ROUNDS * len(self._numbers):
            self._settle(fastest(self._numbers, peers.gather(self._seconds)))

    def _settle(self, number: int) -> None:
        self.settled = number
        self._use(number)

    def _use(self, number: int) -> None:
        for dispatcher in self._dispatchers:
            dispatcher.chunks = number


def _measured_layers(model: OmniModel) -> Iterator[tuple[RankDispatcher, int]]:
    """The dispatchers of components whose plan says so, and how many experts each has on a rank."""
    layout = layout_of(model)
    if layout is None:
        return
    for name, layers in expert_layers(model).items():
        for layer in layers if layout.components[name].plan.expert_chunks == AUTO_CHUNKS else ():
            dispatcher = settings_of(model.get_submodule(layer.name)).dispatcher
            if isinstance(dispatcher, ShareOfTokens):
                dispatcher = dispatcher.inner
            if isinstance(dispatcher, RankDispatcher):
                yield dispatcher, layer.num_experts // dispatcher.link.size

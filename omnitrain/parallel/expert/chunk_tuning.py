"""Measure the best number of chunks of a model's experts, for ``experts.chunks: auto``.

Any number gives the same bits, so the first steps of a run try the numbers in turn, and the fastest one stays.
Components are measured one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median

from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.experts.entry import settings_of
from omnitrain.parallel.expert.apply import expert_layers
from omnitrain.parallel.expert.dispatch import RankDispatcher, TPTokenDispatcher
from omnitrain.parallel.layout import layout_of
from omnitrain.peers import Peers
from omnitrain.recipe.plan_groups import AUTO_CHUNKS

ROUNDS = 3
_WARM_UP = 1  # steps in which memory is allocated and kernels are loaded


def candidates(fewest: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... up to the smallest number of experts that a rank has of a layer."""
    return tuple(2**power for power in range(fewest.bit_length()))


def fastest(numbers: Sequence[int], seconds: Sequence[Sequence[float]]) -> int:
    """Return the number, of those used in turn, with the least median of the slowest rank's seconds per token."""
    slowest = [max(of_ranks) for of_ranks in zip(*seconds, strict=True)]
    return min(numbers, key=lambda number: (median(slowest[numbers.index(number) :: len(numbers)]), number))


class ExpertChunks:
    """Measure the number of chunks during the first steps of a model, parallelized or on one process; keep the fastest.

    ``settled``: component -> the result of an earlier start of the run. A component is measured again if ranks have
    fewer of its experts now.
    """

    def __init__(self, model: OmniModel, settled: Mapping[str, int] | None = None) -> None:
        self._dispatchers: dict[str, list[RankDispatcher]] = {}
        fewest: dict[str, int] = {}
        for component, dispatcher, experts in _measured_layers(model):
            self._dispatchers.setdefault(component, []).append(dispatcher)
            fewest[component] = min(experts, fewest.get(component, experts))
        self._numbers = {component: candidates(experts) for component, experts in fewest.items()}
        self._found = {name: n for name, n in (settled or {}).items() if n <= fewest.get(name, n)}
        self._open = [component for component in fewest if component not in self._found]
        self._seconds: list[float] = []
        self._steps = -_WARM_UP
        for component in self._dispatchers.keys() & self._found.keys():
            self._use(component, self._found[component])

    @property
    def settled(self) -> dict[str, int] | None:
        """Component -> its number of chunks; None: the measurement has not finished, or no component needs it."""
        return None if self._open else dict(self._found) or None

    @contextmanager
    def measured(self, tokens: int, peers: Peers) -> Iterator[None]:
        """Wrap a step with ``tokens`` tokens on all ranks; all ranks must call it."""
        if not self._open:
            yield
            return
        component = self._open[0]
        numbers = self._numbers[component]
        self._use(component, numbers[max(self._steps, 0) % len(numbers)])
        started = time.perf_counter()
        yield
        if self._steps >= 0:
            self._seconds.append((time.perf_counter() - started) / max(tokens, 1))
        self._steps += 1
        if self._steps == ROUNDS * len(numbers):
            self._found[component] = fastest(numbers, peers.gather(self._seconds))
            self._use(component, self._found[component])
            self._open.remove(component)
            self._seconds, self._steps = [], -_WARM_UP

    def _use(self, component: str, number: int) -> None:
        for dispatcher in self._dispatchers[component]:
            dispatcher.chunks = number


def _measured_layers(model: OmniModel) -> Iterator[tuple[str, RankDispatcher, int]]:
    """Component, dispatcher and number of experts per rank, for each layer with ``experts.chunks: auto``."""
    layout = layout_of(model)
    if layout is None:
        return
    for name, layers in expert_layers(model).items():
        for layer in layers if layout.components[name].plan.experts.chunks == AUTO_CHUNKS else ():
            dispatcher = settings_of(model.get_submodule(layer.name)).dispatcher
            if isinstance(dispatcher, TPTokenDispatcher):
                dispatcher = dispatcher.inner
            if isinstance(dispatcher, RankDispatcher):
                yield name, dispatcher, layer.num_experts // dispatcher.link.size

"""On a GPU flex attention is compiled. Here torch compiles it, too, but for the kernel, which no CPU has."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from omnitrain.ops.attention.backends import flex
from omnitrain.ops.attention.spec import AttentionCall, MaskSpec
from omnitrain.ops.experts.routing_tape import RoutingTape

OF_TORCH = 8  # compilations of one piece of code that torch keeps


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.fx.GraphModule]]:
    """Those of attention that are compiled, as on a GPU."""
    made: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        made.append(graph)
        return graph

    torch._dynamo.reset()
    flex._function.cache_clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=keep))
    compiled = flex._function(True)
    monkeypatch.setattr(flex, "_function", lambda _: compiled)
    yield made
    monkeypatch.undo()
    flex._function.cache_clear()
    torch._dynamo.reset()


@torch.no_grad()
def attend(spec: MaskSpec) -> None:
    states = torch.randn(1, 1, spec.offsets[-1], 16)
    flex.attend(AttentionCall(states, states, states, spec))


def recompute(layers: list[tuple[MaskSpec, RoutingTape]]) -> None:
    for spec, tape in layers:
        with tape.replaying():
            attend(spec)


@pytest.mark.second
def test_rows_of_any_length_are_attended_to_by_layers_of_all_kinds_in_forwards_and_recomputations(
    graphs: list[torch.fx.GraphModule],
) -> None:
    with ThreadPoolExecutor(1) as backward:  # as on a GPU
        for length in (200, 300):
            layers = [
                (MaskSpec((0, 30, length), causal=True, window=window), RoutingTape()) for window in (None, 8, 16)
            ]
            for spec, tape in layers:
                attend(spec)
                with tape.recording():
                    attend(spec)
            backward.submit(recompute, layers).result()
    assert len(graphs) > OF_TORCH

"""An oracle: the collectives that a step plan implies, in order. A replay compares them with those that ran."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from omnitrain.plan.placement import CallSite, Placement
from omnitrain.plan.step import StepPlan

CollectiveKind = Literal["unshard", "exchange", "unshard_again", "reduce_scatter", "all_reduce", "exchange_back"]


@dataclass(frozen=True)
class Collective:
    """One collective of a component, or of all its sharded units together.

    Attributes:
        kind: in the forward ``unshard`` and ``exchange``; in the backward ``exchange_back``, ``unshard_again``,
            ``reduce_scatter`` and, across replicas, ``all_reduce``.
        component: component whose parameters or features move.
        micro_batch: index of the micro-batch.
        call: index among the component's calls in this micro-batch. -1: once for all calls (exchanges, reductions).
    """

    kind: CollectiveKind
    component: str
    micro_batch: int
    call: int


def implied_collectives(plan: StepPlan, rank: int) -> tuple[Collective, ...]:
    """Return the collectives that ``rank`` takes part in, in order.

    A micro-batch encodes component by component, each followed by its exchange, then runs the foundation, then the
    heads. The backward runs in reverse order through everything that has gradients. A step without a token to predict
    has no backward.

    A component consists of several sharded units: its blocks, and one outermost unit around them. Each unit reduces
    once per micro-batch, because autograd first adds up the gradients of all calls. A unit whose input needs no
    gradient, such as the outermost unit of an encoder, reduces at the end of the micro-batch. In the backward, blocks
    are gathered again for each call. The outermost unit is gathered again once and kept; that of the foundation is
    never gathered again.
    """
    return tuple(
        collective for micro_batch in range(plan.num_micro_batches) for collective in _of_one(plan, rank, micro_batch)
    )


@dataclass(frozen=True)
class _Phase:
    """A call, or the exchange after the last call of a component's media."""

    component: Placement
    call: int
    has_backward: bool


def _of_one(plan: StepPlan, rank: int, micro_batch: int) -> Iterator[Collective]:
    phases = list(_phases(plan, rank, micro_batch))
    for phase in phases:
        if phase.call < 0:
            yield Collective("exchange", phase.component.name, micro_batch, -1)
        elif len(phase.component.ranks) > phase.component.num_replicas:
            yield Collective("unshard", phase.component.name, micro_batch, phase.call)
    for phase in reversed(phases):
        if phase.has_backward:
            yield from _backward(plan, phase, micro_batch)


def _phases(plan: StepPlan, rank: int, micro_batch: int) -> Iterator[_Phase]:
    topology, num_calls = plan.topology, dict.fromkeys((c.name for c in plan.topology.components), 0)
    has_gradient = any(c.is_trained for c in topology.components) and any(plan.loss_counts.values())
    for index, call_site in enumerate(topology.call_sites):
        component = topology.component(call_site.component)
        # Gradients pass through the foundation and the heads to every trained component.
        has_backward = has_gradient and (component.is_trained or call_site.kind != "encode")
        if rank in component.ranks:
            for _ in range(int(plan.calls[micro_batch, index])):
                yield _Phase(component, num_calls[component.name], has_backward)
                num_calls[component.name] += 1
        if _is_last_port(topology.call_sites, index) and has_exchange(plan, component.name, micro_batch, rank):
            yield _Phase(component, -1, has_backward)


def _is_last_port(call_sites: tuple[CallSite, ...], index: int) -> bool:
    following = call_sites[index + 1 : index + 2]
    is_port = call_sites[index].kind == "encode"
    return is_port and not (
        following and following[0].kind == "encode" and following[0].component == call_sites[index].component
    )


def _backward(plan: StepPlan, phase: _Phase, micro_batch: int) -> Iterator[Collective]:
    component = phase.component
    if phase.call < 0:
        yield Collective("exchange_back", component.name, micro_batch, -1)
        return
    if len(component.ranks) > component.num_replicas:
        yield Collective("unshard_again", component.name, micro_batch, phase.call)
    if not component.is_trained or phase.call > 0:  # the backward reaches the first call last
        return
    if len(component.ranks) > component.num_replicas:
        yield Collective("reduce_scatter", component.name, micro_batch, -1)
    if component.num_replicas > 1 and micro_batch == plan.last_active(component.name):
        yield Collective("all_reduce", component.name, micro_batch, -1)


def has_exchange(plan: StepPlan, component: str, micro_batch: int, rank: int) -> bool:
    """Whether ``rank`` takes part in an exchange of features.

    With ``place: world`` all ranks take part if any item moves, otherwise the ranks of its data group.
    """
    topology = plan.topology
    if not topology.media_of(component) or not topology.moves(component):
        return False
    routes = plan.routes(component, micro_batch)
    is_sent = routes.producer != routes.consumer
    if topology.component(component).place != "world":
        is_sent &= topology.group_of[routes.consumer] == topology.group_of[rank]
    return bool(is_sent.any())

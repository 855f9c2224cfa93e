"""What every rank knows before any data: the components, the ranks they live on, and the ways they are called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

Place = Literal["local", "group", "world"]
EntranceKind = Literal["encode", "forward", "head"]


@dataclass(frozen=True)
class Port:
    """A kind of media that a component encodes.

    Attributes:
        name: unique among all components: ``foundation.image``, ``image_encoder``, ...
        is_one_at_a_time: every item is a call of its own, because the tower mixes items.
    """

    name: str
    is_one_at_a_time: bool = False


@dataclass(frozen=True)
class PlannedComponent:
    """A component as the step plan sees it.

    Attributes:
        name: of the component.
        ranks: of its mesh; all of them call it equally often.
        ports: the media it encodes, in the order in which it encodes them.
        reads_packs: it is called once per micro-batch with the packed sequence: the foundation.
        head: name of the loss that it computes from the foundation's hidden states, in a call of its own; None: none.
        place: who encodes an item: its owner, the ranks that hold its sample, or all ranks of the component.
        num_replicas: copies of its parameters among its ranks; each copy is sharded over ``len(ranks) / num_replicas``.
        is_trained: it has parameters that get a gradient.
        is_shared: the ranks that hold a sample encode each of its items together, so that none moves.
    """

    name: str
    ranks: tuple[int, ...]
    ports: tuple[Port, ...] = ()
    reads_packs: bool = False
    head: str | None = None
    place: Place = "local"
    num_replicas: int = 1
    is_trained: bool = True
    is_shared: bool = False

    @property
    def num_shards(self) -> int:
        """Ranks that share one copy of the parameters."""
        return len(self.ranks) // self.num_replicas


@dataclass(frozen=True)
class CallSite:
    """One way in which a component is called: a port, the foundation's forward, or a head.

    Attributes:
        component: its name.
        kind: ``encode``, ``forward`` or ``head``.
        name: of the port, the component or the loss.
    """

    component: str
    kind: EntranceKind
    name: str


@dataclass(frozen=True)
class Topology:
    """Components and ranks of a run; equal on all ranks.

    Attributes:
        world_size: number of ranks.
        components: in the order in which they encode.
        losses: names, in the order of their columns in the table.
        data_groups: ranks that hold the same samples (sequence and tensor parallel peers), each rank in one group.
            Empty: every rank has samples of its own. A sample is listed in the table of one rank of its group, its
            owner: the first.

    Raises:
        ValueError: every contradiction at once.
    """

    world_size: int
    components: tuple[PlannedComponent, ...]
    losses: tuple[str, ...]
    data_groups: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if not self.data_groups:
            object.__setattr__(self, "data_groups", tuple((rank,) for rank in range(self.world_size)))
        problems = [*self._rank_problems(), *self._name_problems()]
        if problems:
            raise ValueError("\n".join(problems))

    @cached_property
    def ports(self) -> tuple[Port, ...]:
        """All ports, component by component; a port's index is its number in tables and plans."""
        return tuple(port for component in self.components for port in component.ports)

    @cached_property
    def call_sites(self) -> tuple[CallSite, ...]:
        """All entrances in the order in which a micro-batch calls them; the ports come first."""
        encode = [CallSite(c.name, "encode", port.name) for c in self.components for port in c.ports]
        forward = [CallSite(c.name, "forward", c.name) for c in self.components if c.reads_packs]
        heads = [CallSite(c.name, "head", c.head) for c in self.components if c.head is not None]
        return (*encode, *forward, *heads)

    @cached_property
    def group_of(self) -> np.ndarray:
        """``[world_size]`` int64: index of each rank's data group."""
        groups = np.empty(self.world_size, dtype=np.int64)
        for index, group in enumerate(self.data_groups):
            groups[list(group)] = index
        return groups

    def is_owner(self, rank: int) -> bool:
        """Whether ``rank`` lists the samples of its data group in its table; the other ranks of the group list none."""
        return bool(self.data_groups[self.group_of[rank]][0] == rank)

    def moves(self, component: str) -> bool:
        """Whether an item of the component may be encoded by another rank than one that needs its rows."""
        found = self.component(component)
        return not found.is_shared and (found.place != "local" or any(len(group) > 1 for group in self.data_groups))

    def component(self, name: str) -> PlannedComponent:
        """The component of that name."""
        return next(component for component in self.components if component.name == name)

    def call_sites_of(self, component: str) -> tuple[int, ...]:
        """Indices of the component's entrances, in the order in which a micro-batch calls them."""
        return tuple(index for index, call_site in enumerate(self.call_sites) if call_site.component == component)

    def ports_of(self, component: str) -> range:
        """Indices of the component's ports."""
        found = [index for index in self.call_sites_of(component) if self.call_sites[index].kind == "encode"]
        return range(found[0], found[-1] + 1) if found else range(0)

    def _rank_problems(self) -> Iterable[str]:
        everyone = set(range(self.world_size))
        listed = [rank for group in self.data_groups for rank in group]
        if sorted(listed) != sorted(everyone):
            yield f"data groups {self.data_groups}: expected each of {self.world_size} ranks in exactly one of them"
        for component in self.components:
            ranks = set(component.ranks)
            if not ranks or len(ranks) < len(component.ranks) or not ranks <= everyone:
                yield f"{component.name}: found ranks {component.ranks}; expected different ones of {self.world_size}"
            elif len(ranks) % component.num_replicas:
                yield f"{component.name}: {len(ranks)} ranks do not hold {component.num_replicas} equal replicas"
            elif (component.reads_packs or component.head is not None) and len(ranks) < self.world_size:
                away = sorted(everyone - ranks)
                yield f"{component.name}: it works on sequences, but does not live on ranks {away}, which hold some"
            elif component.ports:
                yield from self._place_problems(component)

    def _place_problems(self, component: PlannedComponent) -> Iterable[str]:
        ranks = set(component.ranks)
        if component.place == "local" and len(ranks) < self.world_size:
            away = sorted(set(range(self.world_size)) - ranks)
            yield f"{component.name}: `place: local`, but it does not live on ranks {away}; use `place: world`"
        without = [group for group in self.data_groups if ranks.isdisjoint(group)]
        if component.place == "group" and without:
            yield f"{component.name}: `place: group`, but it lives on no rank of {without}; use `place: world`"

    def _name_problems(self) -> Iterable[str]:
        for kind, names in (
            ("component", [component.name for component in self.components]),
            ("port", [port.name for port in self.ports]),
            ("loss", self.losses),
        ):
            yield from (f"{kind} {name!r} exists {n} times" for name, n in Counter(names).items() if n > 1)
        for component in self.components:
            if component.head is not None and component.head not in self.losses:
                yield f"{component.name}: its loss {component.head!r} is none of {list(self.losses)}"

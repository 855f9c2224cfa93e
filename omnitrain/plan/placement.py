"""Facts that every rank knows before it draws data: where and when each component runs, and its call sites."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

Place = Literal["local", "group", "world"]
EdgeKind = Literal["forward", "exchange", "message"]
CallSiteKind = Literal["encode", "forward", "head"]


@dataclass(frozen=True)
class Placement:
    """Where and when a component runs, and how its features reach their readers. Ranks are global."""

    name: str
    ranks: tuple[int, ...]  # ranks of its mesh; all of them call it equally often
    # names of the media that it encodes, in this order: ``image_encoder``, or ``foundation.image`` if the foundation
    # reads images by itself. Unique among all components
    media: tuple[str, ...] = ()
    reads_packs: bool = False  # whether it is the foundation, called once per micro-batch with the packed sequence
    # name of the loss that it computes from the foundation's hidden states in a separate call, or None. With an edge of
    # messages, the section computes it; else the forward of the last stage does
    head: str | None = None
    # ranks among which an item may be encoded: ``local`` its owner, ``group`` the ranks that hold its sample, ``world``
    # all ranks of the component
    place: Place = "local"
    # copies of its parameters among its ranks; each copy is sharded over ``len(ranks) / num_replicas``
    num_replicas: int = 1
    # whether it has a backward: a parameter of it, or of the component that it reads, gets a gradient
    is_trained: bool = True
    # ranks that make each call together, with the same items, in groups of one size; each rank of the component is in
    # one group, each group within a data group. Empty: each rank makes its calls alone
    call_groups: tuple[tuple[int, ...], ...] = ()
    # whether the ranks of a call group divide the work of a call. Otherwise each of them does all of it
    is_shared: bool = False
    window: int | None = 1  # number of micro-batches whose items are encoded together; None: all of the step
    # most input elements of a call; a larger item has a call of its own. None: no limit
    call_elements: int | None = None
    # the component whose features are its input; empty: it reads media. Its items are those of this component, under a
    # name of their own
    reads: str = ""
    section: str = "main"  # name of the section that has it
    # how its features reach their readers. ``forward``: each micro-batch's forward calls it. ``exchange``: an action of
    # the schedule calls it, window by window, and another one exchanges the features, which all of its ranks run.
    # ``message``: the ranks of its section call it, and send the features
    edge: EdgeKind = "forward"
    # the axis (or product of axes) whose ranks exchange its features, without ``message``; of ranks that make a call
    # together, one of each group takes part
    exchange: str = ""
    at_end: bool = False  # whether the last stage of a pipeline reads its features, not the first one
    # rank of a reader on the last stage, minus the rank of the first stage with the same samples. 0 for the edge
    # ``forward``: calls of all stages are planned as if the first stage made them
    behind: int = 0

    def facts(self, reader: str, ranks: Iterable[int]) -> dict[str, str]:
        """Return what a table shows of it; ``reader``: of its features, or empty; ``ranks``: those that compute it."""
        together = len(self.call_groups[0]) if self.call_groups else 1
        windows = {None: "the step", 1: "1 micro-batch"}.get(self.window, f"{self.window} micro-batches")
        roads = {"forward": f"in the forwards{' (all-to-all)' * (self.place != 'local')}", "exchange": "all-to-all"}
        return {
            "component": self.name,
            "section": self.section,
            "ranks": _ranges(ranks),
            "ranks of a call": str(together),
            "encodes the items of": windows if self.media else "",
            "features go to": reader,
            "by": roads.get(self.edge, "messages") if reader else "",
        }


@dataclass(frozen=True)
class CallSite:
    """One way to call a component: ``name`` is the media that it encodes, the foundation, or the loss of a head."""

    component: str
    kind: CallSiteKind
    name: str


class PipelineShape(NamedTuple):
    """What decides the forwards and backwards of a step, besides its number of micro-batches.

    Fields as the arguments of :func:`~omnitrain.plan.schedule.generators.generate`.
    """

    kind: str = "1f1b"
    num_ranks: int = 1
    num_chunks: int | None = None
    group_size: int | None = None
    overlap: bool = False
    extra_forwards: int = 0

    @property
    def is_cut(self) -> bool:
        """Whether actions of their own gather weights, and send between stages."""
        return self.num_ranks > 1 or self.overlap


@dataclass(frozen=True)
class Topology:
    """Components and ranks of a run; equal on all ranks. A ValueError lists all problems of ranks, names and places."""

    world_size: int  # number of ranks
    components: tuple[Placement, ...]  # components in the order in which they encode
    losses: tuple[str, ...]  # names of the losses, in the order of their columns in the table
    # ranks that hold the same samples (sequence and tensor parallel peers), each rank in one group. Empty: every rank
    # draws different samples. Only the first rank of a group, the owner of its samples, lists them in its table
    data_groups: tuple[tuple[int, ...], ...] = ()
    # for each rank, the rank of the first pipeline stage that has the same samples; only ranks of the first stage list
    # samples and need features. Empty: one stage
    first_stage: tuple[int, ...] = ()
    # ranks that have samples, directly or from the first stage. The others only encode (sections), and have no packs.
    # Empty: all ranks
    readers: tuple[int, ...] = ()
    pipeline: PipelineShape = field(default_factory=PipelineShape)  # of the foundation

    def __post_init__(self) -> None:
        if not self.data_groups:
            object.__setattr__(self, "data_groups", tuple((rank,) for rank in range(self.world_size)))
        if not self.first_stage:
            object.__setattr__(self, "first_stage", tuple(range(self.world_size)))
        if not self.readers:
            object.__setattr__(self, "readers", tuple(range(self.world_size)))
        if problems := [*self._problems()]:
            raise ValueError("\n".join(problems))

    @cached_property
    def media(self) -> tuple[str, ...]:
        """The names of all media, component by component. Tables and plans refer to them by their indices here."""
        return tuple(name for component in self.components for name in component.media)

    @cached_property
    def call_sites(self) -> tuple[CallSite, ...]:
        """All call sites in the order in which a micro-batch calls them; call sites of media come first."""
        encode = [CallSite(c.name, "encode", name) for c in self.components for name in c.media]
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

    @cached_property
    def owners(self) -> np.ndarray:
        """``[data-parallel ranks]`` int64: the rank that lists the samples of each data-parallel rank, ascending."""
        return np.unique([self.owner_of(rank) for rank in self.readers])

    def is_owner(self, rank: int) -> bool:
        """Whether ``rank`` is the one rank that lists its samples in its table."""
        return self.owner_of(rank) == rank

    def owner_of(self, rank: int) -> int:
        """Return the rank that lists the samples of ``rank``."""
        return self.data_groups[self.group_of[self.first_stage[rank]]][0]

    def caller_of(self, rank: int, component: str) -> int:
        """Return the rank whose calls of a component ``rank`` makes: itself, or its peer on the first stage."""
        placement = self.component(component)
        return rank if rank in placement.ranks or placement.edge == "message" else self.first_stage[rank]

    @cached_property
    def _drawing(self) -> set[int]:
        """The ranks that list samples, and those that hold the same."""
        return {self.first_stage[rank] for rank in self.readers}

    def call_group_of(self, component: str) -> np.ndarray:
        """Return ``[world_size, size]`` int64: the ranks with which each rank makes the component's calls."""
        return self._call_group_of[component]

    @cached_property
    def _call_group_of(self) -> dict[str, np.ndarray]:
        found = {}
        for component in self.components:
            groups = np.array(component.call_groups or [[rank] for rank in component.ranks])
            found[component.name] = np.repeat(np.arange(self.world_size)[:, None], groups.shape[1], axis=1)
            found[component.name][groups] = groups[:, None]
        return found

    def moves(self, component: str) -> bool:
        """Whether a rank may need features of the component's items that another rank encodes."""
        together = self.call_group_of(component).shape[1]
        return self.component(component).place == "world" or any(len(group) > together for group in self.data_groups)

    def component(self, name: str) -> Placement:
        """Return the component of that name."""
        return next(component for component in self.components if component.name == name)

    def reader_of(self, component: str) -> str | None:
        """Return the component that reads the features of another one; None: the foundation does."""
        return next((reader.name for reader in self.components if reader.reads == component), None)

    def names(self, edge: EdgeKind) -> list[str]:
        """Return the components whose features go this way."""
        return [component.name for component in self.components if component.edge == edge]

    @property
    def heads_apart(self) -> tuple[str, ...]:
        """The decoders whose losses a section computes."""
        return tuple(c.name for c in self.components if c.head is not None and c.edge == "message")

    @property
    def at_end(self) -> frozenset[str]:
        """The components whose features the last stage of a pipeline reads."""
        return frozenset(component.name for component in self.components if component.at_end)

    @property
    def call_elements(self) -> dict[str, int]:
        """Medium -> the most input elements of a call, where there is a limit."""
        limits = {name: component.call_elements for component in self.components for name in component.media}
        return {name: limit for name, limit in limits.items() if limit is not None}

    @property
    def exchanges(self) -> dict[str, str]:
        """Component -> the axis whose ranks exchange its features."""
        return {component.name: component.exchange for component in self.components if component.exchange}

    def facts(self) -> list[dict[str, str]]:
        """Return a row for each component: where and when it runs, and the readers of its features."""
        foundation = next((c.name for c in self.components if c.reads_packs), "")
        readers = {c.name: self.reader_of(c.name) or (foundation if c.media else "") for c in self.components}
        return [c.facts(readers[c.name], self.readers if c.reads_packs else c.ranks) for c in self.components]

    def call_sites_of(self, component: str) -> tuple[int, ...]:
        """Return the indices of the component's call sites, in the order in which a micro-batch calls them."""
        return tuple(index for index, call_site in enumerate(self.call_sites) if call_site.component == component)

    def media_of(self, component: str) -> range:
        """Return the indices of the component's media in :attr:`media`."""
        media = [index for index in self.call_sites_of(component) if self.call_sites[index].kind == "encode"]
        return range(media[0], media[-1] + 1) if media else range(0)

    def items_of(self, component: str, slot: np.ndarray) -> np.ndarray:
        """Return the indices of the component's items, ascending; ``slot``: ``[items]``, as in the tables."""
        medium, media = slot % max(1, len(self.media)), self.media_of(component)
        return np.flatnonzero((medium >= media.start) & (medium < media.stop))

    def _problems(self) -> Iterator[str]:
        everyone = set(range(self.world_size))
        if sorted(rank for group in self.data_groups for rank in group) != sorted(everyone):
            yield f"data groups {self.data_groups}: expected each of {self.world_size} ranks in exactly one group"
        for component in self.components:
            ranks = set(component.ranks)
            if not ranks or len(ranks) < len(component.ranks) or not ranks <= everyone:
                yield f"{component.name}: found ranks {component.ranks}; expected distinct ranks of {self.world_size}"
            elif len(ranks) % component.num_replicas:
                yield f"{component.name}: {len(ranks)} ranks do not hold {component.num_replicas} equal replicas"
            else:
                found = (*self._place_problems(component), *self._call_group_problems(component))
                yield from (f"{component.name}: {problem}" for problem in found)
            if component.head is not None and component.head not in self.losses:
                yield f"{component.name}: its loss {component.head!r} is not in {list(self.losses)}"
        components = [component.name for component in self.components]
        for kind, names in (("component", components), ("media", self.media), ("loss", self.losses)):
            yield from (f"{kind} {name!r} exists {n} times" for name, n in Counter(names).items() if n > 1)

    def _place_problems(self, component: Placement) -> Iterator[str]:
        """Ranks that draw samples have the components that they call."""
        ranks = set(component.ranks)
        missing = sorted(self._drawing - ranks)
        without = [
            group for group in self.data_groups if ranks.isdisjoint(group) and not self._drawing.isdisjoint(group)
        ]
        if missing and (component.reads_packs or (component.head is not None and component.edge != "message")):
            yield f"it reads sequences, but ranks {missing}, which have some, do not hold it"
        elif component.media and component.place == "local" and missing:
            yield f"`place: local`, but ranks {missing} do not hold it; use `place: world`"
        elif component.media and component.place == "group" and without:
            yield f"`place: group`, but no rank of {without} holds it; use `place: world`"

    def _call_group_problems(self, component: Placement) -> Iterator[str]:
        groups = component.call_groups
        if groups and sorted(rank for group in groups for rank in group) != sorted(component.ranks):
            yield f"call groups {groups}; expected each of its ranks in exactly one group"
        elif len({len(group) for group in groups}) > 1:
            yield f"call groups {groups}; expected groups of one size"
        elif any(len({int(self.group_of[rank]) for rank in group}) > 1 for group in groups):
            yield f"call groups {groups}; expected each within one of {self.data_groups}"


def _ranges(ranks: Iterable[int]) -> str:
    """Ranks in words: ``0 to 3, 6``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)

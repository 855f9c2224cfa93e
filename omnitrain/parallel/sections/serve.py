"""Features for evaluation and generation, which have no step plan: ranks of ``main`` ask a section for them.

The first rank of ``main`` tells the ranks of a section which component comes next. Then each rank of the first pipeline
stage sends the items of its pack to one of them, and waits for their features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch

from omnitrain.data.packing.pack import MediaGroup
from omnitrain.errors import LostRankError, UserError
from omnitrain.models.discovery import MediaFeatures
from omnitrain.models.omni.encode import call_component
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.collectives import gathered_objects
from omnitrain.parallel.sections.host_link import HostLink
from omnitrain.parallel.state import ParallelState
from omnitrain.peers import told_error
from omnitrain.recipe.parallel import MAIN, Section

_END = None  # in place of a component
_GRACE_SECONDS = 10.0  # for a section to take the news of a failure


def feature_relay(
    model: OmniModel, sections: Mapping[str, Section], state: ParallelState, device: torch.device
) -> FeatureClient | FeatureServer:
    """Return this rank's end of the connection between ``main`` and its sections. All ranks must call it.

    Args:
        model: parallelized.
        sections: section -> its settings.
        state: the state of this rank's section.
        device: of this rank.
    """
    link, main = HostLink(device), state.of_section(MAIN)
    askers = main.ranks[: main.size("stage")]  # of the first stage
    if state.section != MAIN:
        return FeatureServer(model, state, askers, link)
    servers = {name: state.of_section(of).ranks for of, section in sections.items() for name in section.components}
    return FeatureClient(servers, state.rank, askers, link)


class FeatureClient:
    """:class:`~omnitrain.models.omni.relay.EncoderRelay` of a rank of ``main``.

    Args:
        servers: component -> the ranks that have it.
        rank: of this process.
        askers: the ranks of the first pipeline stage.
        link: between all ranks.
    """

    def __init__(self, servers: Mapping[str, Sequence[int]], rank: int, askers: Sequence[int], link: HostLink) -> None:
        self.components = frozenset(servers)
        self._servers, self._rank, self._askers, self._link = servers, rank, askers, link
        self.is_open = False

    def require_forward(self) -> None:
        """Do nothing: this rank has the foundation."""

    def require_open(self) -> None:
        """Raise unless the sections serve."""
        if not self.is_open:
            raise UserError(
                f"{', '.join(sorted(self.components))}: other ranks encode for this one, and do not listen now; call "
                "omnitrain.serving(model, work) on all ranks, with the evaluation or generation as `work`"
            )

    def encode(self, component: str, calls: Mapping[str, Sequence[MediaGroup]]) -> dict[str, list[MediaFeatures]]:
        """Return the features of each call; see :class:`EncoderRelay`."""
        self.require_open()
        servers = self._servers[component]
        if self._rank == self._askers[0]:
            self._link.send(component, *servers)
        server = servers[self._askers.index(self._rank) % len(servers)]
        self._link.send(calls, server)
        answer: dict[str, list[MediaFeatures]] | Exception = self._link.receive(server)
        if isinstance(answer, Exception):
            raise answer
        return answer

    @contextmanager
    def open(self) -> Iterator[None]:
        """Within this context the sections serve; at its end, also after an error, the first rank tells them."""
        self.is_open = True
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:
            failure = error
            raise
        finally:
            self.is_open = False
            if self._rank == self._askers[0]:
                self._end(failure)

    def _end(self, failure: BaseException | None) -> None:
        ranks = sorted({rank for servers in self._servers.values() for rank in servers})
        if failure is None:
            self._link.send(_END, *ranks)
            return
        with suppress(LostRankError):  # it must not hide the failure
            self._link.send(told_error(failure, self._rank), *ranks, timeout_s=_GRACE_SECONDS)


class FeatureServer:
    """:class:`~omnitrain.models.omni.relay.EncoderRelay` of a rank of a section: it encodes for the ranks that ask.

    Args:
        model: parallelized.
        state: the state of the section.
        askers: the ranks of the first pipeline stage of ``main``.
        link: between all ranks.
    """

    def __init__(self, model: OmniModel, state: ParallelState, askers: Sequence[int], link: HostLink) -> None:
        self.components = frozenset[str]()
        self._model, self._state, self._link = model, state, link
        self._first, self._own = askers[0], askers[state.ranks.index(state.rank) :: state.world_size]

    def require_forward(self) -> None:
        """Raise: this rank does not have the foundation."""
        raise UserError(
            f"rank {self._state.rank} has only the components of the section {self._state.section}, and cannot run the "
            "model; call omnitrain.serving(model, work) on all ranks, with the evaluation or generation as `work`"
        )

    def require_open(self) -> None:
        """Raise: this rank only serves."""
        self.require_forward()

    def encode(self, component: str, calls: Mapping[str, Sequence[MediaGroup]]) -> dict[str, list[MediaFeatures]]:
        """Do not call it: no component is elsewhere."""
        raise AssertionError(component)

    def serve(self) -> None:
        """Encode what ranks of ``main`` ask for, until the first of them says that it was the last.

        Raises:
            UserError: ``main`` ended with it.
            TrainingError: ``main`` ended with another error.
        """
        while (component := self._link.receive(self._first)) is not _END:
            if isinstance(component, Exception):
                raise component
            asked = [self._link.receive(rank) for rank in self._own]
            try:
                answers = self._encoded(component, asked)
            except Exception as error:
                for rank in self._own:
                    self._link.send(told_error(error, self._state.rank), rank, timeout_s=_GRACE_SECONDS)
                raise
            for rank, answer in zip(self._own, answers, strict=True):
                self._link.send(answer, rank)

    def _encoded(
        self, component: str, asked: Sequence[Mapping[str, Sequence[MediaGroup]]]
    ) -> list[dict[str, list[MediaFeatures]]]:
        """The features for each rank that asked. All ranks of the section call the component equally often."""
        names = self._model.media_names[component]
        items = {name: [call for of_rank in asked for call in of_rank[name]] for name in names}
        numbers = gathered_objects({name: len(calls) for name, calls in items.items()}, self._state.section_group)
        most = {name: max(of_rank[name] for of_rank in numbers) for name in names}
        made = call_component(self._model, component, items, most).made
        in_turn = {name: iter(features) for name, features in made.items()}
        return [{name: [next(in_turn[name]) for _ in calls] for name, calls in of_rank.items()} for of_rank in asked]

"""Features for evaluation and generation, which have no step plan: ranks of ``main`` ask a section for them.

The first rank of ``main`` tells the ranks of a section which component comes next. Then each rank of the first pipeline
stage sends the items of its pack to one of them, and waits for their features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch

from omnitrain.data.packing.pack import MediaGroup, Pack
from omnitrain.errors import LostRankError, UserError
from omnitrain.models.discovery import MediaFeatures
from omnitrain.models.omni.encode import ComponentCalls, call_component, own_calls, reading
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.collectives import gathered_objects
from omnitrain.parallel.sections.host_link import HostLink
from omnitrain.parallel.state import ParallelState
from omnitrain.peers import told_error
from omnitrain.recipe.parallel import FOUNDATION, MAIN, Section

_END = None  # in place of a component
_GRACE_SECONDS = 10.0  # for a section to take the news of a failure


class AskSections:
    """:class:`~omnitrain.models.omni.encode.Ask` of a run with sections. All ranks must create it.

    Args:
        model: parallelized.
        sections: section -> its settings.
        state: the state of this rank's section.
        device: of this rank.

    Attributes:
        is_served: whether this rank is one of ``main``, for which the others encode.
        is_open: whether they do so now.
    """

    def __init__(
        self, model: OmniModel, sections: Mapping[str, Section], state: ParallelState, device: torch.device
    ) -> None:
        self._model, self._state, self._link = model, state, HostLink(device)
        main = state.of_section(MAIN)
        self._askers = main.ranks[: main.size("stage")]  # of the first stage
        self._servers = {n: state.of_section(of).ranks for of, section in sections.items() for n in section.components}
        self.is_served = state.section == MAIN
        self.is_open = False

    def __call__(self, pack: Pack, calls: Mapping[str, int]) -> dict[str, MediaFeatures]:
        """Return component -> its features for a pack; see :class:`~omnitrain.models.omni.encode.Ask`."""
        self.require(FOUNDATION)
        if not self.is_open:
            raise UserError(
                f"{', '.join(sorted(self._servers))}: other ranks encode for this one, and do not listen now; call "
                "omnitrain.serving(model, work) on all ranks, with the evaluation or generation as `work`"
            )
        found: dict[str, MediaFeatures] = {}
        for component, names in self._model.media_names.items():
            if component in self._servers and any(calls.get(name) for name in names):
                found[component] = self._asked(component, pack, found.get(self._model.reads.get(component, "")))
        return found

    def _asked(self, component: str, pack: Pack, rows: MediaFeatures | None) -> MediaFeatures:
        """The features of a component; ``rows``: those that it reads in place of media."""
        items = {name: own_calls(self._model, pack, name) for name in self._model.media_names[component]}
        if rows is not None:
            items = {name: reading(groups, rows) for name, groups in items.items()}
        servers = self._servers[component]
        if self._state.rank == self._askers[0]:
            self._link.send(component, *servers)
        server = servers[self._askers.index(self._state.rank) % len(servers)]
        self._link.send(items, server)
        answer: MediaFeatures | Exception = self._link.receive(server)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def require(self, component: str) -> None:
        """Raise if this rank does not have a component; see :class:`~omnitrain.models.omni.encode.Ask`."""
        state = self._state
        if not self.is_served:
            raise UserError(
                f"rank {state.rank} has only the components of the section {state.section}, and cannot run the model; "
                "call omnitrain.serving(model, work) on all ranks, with the evaluation or generation as `work`"
            )
        if component in self._servers:
            raise UserError(
                f"{component} is on other ranks, and a forward by itself does not tell them to encode: use "
                "accumulate_gradients to train, and heldout_loss or generate (in omnitrain.serving) otherwise"
            )

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
            if self._state.rank == self._askers[0]:
                self._end(failure)

    def _end(self, failure: BaseException | None) -> None:
        ranks = sorted({rank for servers in self._servers.values() for rank in servers})
        if failure is None:
            self._link.send(_END, *ranks)
            return
        with suppress(LostRankError):  # it must not hide the failure
            self._link.send(told_error(failure, self._state.rank), *ranks, timeout_s=_GRACE_SECONDS)

    def serve(self) -> None:
        """Encode what ranks of ``main`` ask for, until the first of them says that it was the last.

        Raises:
            UserError: ``main`` ended with it.
            TrainingError: ``main`` ended with another error.
        """
        state, link = self._state, self._link
        own = self._askers[state.ranks.index(state.rank) :: state.world_size]
        while (component := link.receive(self._askers[0])) is not _END:
            if isinstance(component, Exception):
                raise component
            asked = [link.receive(rank) for rank in own]
            try:
                answers = self._encoded(component, asked)
            except Exception as error:
                for rank in own:
                    link.send(told_error(error, state.rank), rank, timeout_s=_GRACE_SECONDS)
                raise
            for rank, answer in zip(own, answers, strict=True):
                link.send(answer, rank)

    def _encoded(self, component: str, asked: Sequence[Mapping[str, Sequence[MediaGroup]]]) -> list[MediaFeatures]:
        """The features for each rank that asked. All ranks of the section call the component equally often."""
        names = self._model.media_names[component]
        items = {name: [call for of_rank in asked for call in of_rank[name]] for name in names}
        numbers = gathered_objects({name: len(calls) for name, calls in items.items()}, self._state.section_group)
        most = {name: max(of_rank[name] for of_rank in numbers) for name in names}
        calls = call_component(self._model, component, items, most)
        in_turn = {name: iter(features) for name, features in calls.made.items()}
        made = [{name: [next(in_turn[name]) for _ in groups] for name, groups in of_rank.items()} for of_rank in asked]
        return [calls.pattern.with_rows(ComponentCalls(of_rank, [calls.pattern]).joined) for of_rank in made]

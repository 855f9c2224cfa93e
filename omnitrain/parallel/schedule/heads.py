"""The losses of decoders in sections: hidden states go there, and losses come back with the gradients of these states.

Each token of a decoder's item is predicted from a hidden state, which goes to the rank that has encoded the item, and
so has its labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from omnitrain.errors import UserError
from omnitrain.models.components.outputs import OmniOutput, StatesApart
from omnitrain.models.omni.model import OmniModel, idle_head
from omnitrain.ops.loss.cross_entropy import LossTerm
from omnitrain.parallel.layout import layout_of
from omnitrain.parallel.sections.edges import FeatureEdge, loss_metrics
from omnitrain.parallel.step.media_dispatch import StepBatch
from omnitrain.plan.schedule.actions import LOSS, STATES, Action, Kind, Schedule

_Key = tuple[str, int]  # decoder, micro-batch


class HeadsApart:
    """This rank's part in the losses that sections compute in a step: on the last stage, or in a section.

    Args:
        model: parallelized, or on one process.
        batch: the step.
        weights: head -> weight of its loss; 1 where it is not given.
        labels: decoder and micro-batch -> labels ``[n, ...]`` of the items that this rank has encoded; each is taken.
        share: 1 on the one rank of those with equal hidden states that counts, 0 on the others.
        trains: whether gradients are needed.
    """

    def __init__(
        self,
        model: OmniModel,
        batch: StepBatch,
        weights: Mapping[str, float],
        labels: dict[_Key, Tensor],
        *,
        share: float,
        trains: bool,
    ) -> None:
        layout = layout_of(model)
        self._model, self._plan, self._labels = model, batch.plan, labels
        self._weights, self._share, self._trains = weights, share, trains
        self._edges: Mapping[str, FeatureEdge] = {} if layout is None else layout.losses
        self._kept: dict[_Key, StatesApart] = {}  # of the last stage, until their losses are there
        self._states: dict[_Key, Tensor] = {}  # those that came to this rank of a section
        self._losses: dict[_Key, list[Tensor]] = {}  # of a section, until they are sent
        self._gradients: dict[_Key, Tensor] = {}

    def expect(self, schedule: Schedule) -> None:
        """Prepare for the messages of a step."""
        actions = [action for row in schedule.actions for action in row if action.kind is Kind.HEAD]
        for decoder, edge in self._edges.items():
            micro_batches = [a.micro_batch for a in actions if a.component == decoder and a.micro_batch is not None]
            edge.expect(self._plan, micro_batches, trains=self._trains)

    # On the last stage

    def keep(self, micro_batch: int, states: Mapping[str, StatesApart]) -> tuple[Tensor, ...]:
        """Keep the hidden states of a forward until they are sent; return them as their gradients will come back."""
        for decoder, given in states.items():
            whole = (given.states * self._share).to(self._edges[decoder].hidden.dtype)
            self._kept[decoder, micro_batch] = given._replace(states=whole)
        return tuple(self._kept[decoder, micro_batch].states for decoder in states)

    def take_gradients(self, decoders: Sequence[str], micro_batch: int) -> list[Tensor]:
        """Return the gradients of what :meth:`keep` returned."""
        return [self._gradients.pop((decoder, micro_batch)) for decoder in decoders]

    def _take_loss(self, decoder: str, micro_batch: int) -> OmniOutput:
        columns, *gradients = self._edges[decoder].take(micro_batch)
        kept = self._kept.pop((decoder, micro_batch))
        if gradients:
            self._gradients[decoder, micro_batch] = gradients[0]
        rows, *metrics = columns[kept.here.to(columns.device)].unbind(1)
        if not len(rows):
            return OmniOutput({}, {}, None)
        term = LossTerm(
            rows.sum(), len(rows), rows, dict(zip(loss_metrics(self._model, decoder), metrics, strict=True))
        )
        return OmniOutput({decoder: term}, {decoder: kept.read}, None)

    # In a section

    def compute(self, decoder: str, micro_batch: int) -> None:
        """Compute the losses of the hidden states that came, and their gradients; a backward of the head, too."""
        key = decoder, micro_batch
        states, labels, head = self._states.pop(key), self._labels.pop(key), self._model.decoders[decoder]
        with torch.set_grad_enabled(self._trains):
            states.requires_grad_(self._trains)
            if len(labels):
                term = head.lm_head(states, labels)
                loss, columns = term.sum, loss_columns(decoder, term, loss_metrics(self._model, decoder))
            else:  # the other ranks of the section gather its weights
                loss = idle_head(head, states.new_zeros(1, 1, states.size(-1))) * 0.0
                columns = states.new_zeros(0, 1 + len(loss_metrics(self._model, decoder)), dtype=torch.float32)
            if self._trains:
                torch.autograd.backward(
                    loss * self._weights.get(decoder, 1.0) / max(self._plan.loss_counts[decoder], 1)
                )
        self._losses[key] = [columns.detach().float()]
        if self._trains:
            self._losses[key].append(torch.zeros_like(states) if states.grad is None else states.grad)

    # Messages, at both ends

    def send(self, action: Action) -> None:
        """Send the hidden states that :meth:`keep` got, or what :meth:`compute` has computed."""
        decoder, micro_batch = key = _key(action)
        if action.component.endswith(STATES):
            self._edges[decoder].give_back(micro_batch, [self._kept[key].states.detach()])
        else:
            self._edges[decoder].send(micro_batch, self._losses.pop(key))

    def receive(self, action: Action) -> OmniOutput | None:
        """Wait for hidden states; or for the losses of a micro-batch on this rank, which are returned."""
        decoder, micro_batch = key = _key(action)
        if action.component.endswith(LOSS):
            return self._take_loss(decoder, micro_batch)
        (self._states[key],) = self._edges[decoder].take_gradients(micro_batch, len(self._labels[key]))
        return None

    def finish(self) -> None:
        """End the step: wait until all messages have left; nothing may be left."""
        for edge in self._edges.values():
            edge.finish()
        left = [key for kept in (self._labels, self._kept, self._states, self._losses, self._gradients) for key in kept]
        assert not left, f"(decoder, micro-batch) whose loss or gradients nobody has taken: {left}"


def loss_columns(decoder: str, term: LossTerm, metrics: Sequence[str]) -> Tensor:
    """Return the losses ``[n, 1 + metrics]`` of ``n`` tokens as a message has them: each loss, then its metrics.

    Raises UserError: the metrics of the loss are not the decoder's ``token_metrics``, for which the message has room.
    """
    if term.metrics.keys() != {*metrics}:
        raise UserError(
            f"{decoder}: its loss has the metrics {sorted(term.metrics)}, but its `token_metrics` are "
            f"{sorted(metrics)}; name the same ones"
        )
    return torch.stack([term.rows, *(term.metrics[name] for name in metrics)], dim=1)


def _key(action: Action) -> _Key:
    assert action.micro_batch is not None
    return action.owner, action.micro_batch

"""Run this rank's actions of an optimizer step: one loop for gradient accumulation and for pipelines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from omnitrain.data.packing.pack import Pack
from omnitrain.models.components.outputs import OmniOutput
from omnitrain.models.foundation.encoded_pack import EncodedPack
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.delayed_wgrad import WeightGradients, delaying
from omnitrain.ops.draws import StepDraws
from omnitrain.ops.timing import SpanRecorder, What
from omnitrain.ops.turns import run_in_turns
from omnitrain.parallel.expert.load_balance import RouterMonitor
from omnitrain.parallel.fsdp.hold import HeldUnits, reducing_later
from omnitrain.parallel.layout import layout_of, reduce_all_replicas, reduce_replicas
from omnitrain.parallel.pipeline.apply import StageMessages
from omnitrain.parallel.resolve import dtype_of
from omnitrain.parallel.schedule.graph import StepGraph
from omnitrain.parallel.schedule.heads import HeadsApart
from omnitrain.parallel.schedule.position import row_of, running_action
from omnitrain.parallel.sections.carriers.torch_p2p import Transfer
from omnitrain.parallel.step.media_dispatch import StepBatch
from omnitrain.parallel.step.work import encoded_pack
from omnitrain.parallel.watch.report import Phase, RunningAction
from omnitrain.plan.schedule.actions import WEIGHTS, Action, Kind, Schedule, without_backwards
from omnitrain.recipe.parallel import FOUNDATION

OnOutput = Callable[[Pack, OmniOutput], Any]
ForwardContext = Callable[[EncodedPack], AbstractContextManager[Any]]
OnEncoded = Callable[[int, EncodedPack], Any]

_Key = tuple[int, int]  # stage, micro-batch


class OnPhase(Protocol):
    """Called with a rank's position in a step."""

    def __call__(
        self,
        *,
        micro_batch: int | None = None,
        phase: Phase | None = None,
        samples: Sequence[str] | None = None,
        action: RunningAction | None = None,
    ) -> object:
        """Arguments that are not given keep their last value."""
        ...


@dataclass
class _LiveMicroBatch:
    """A micro-batch in a stage, between its forward and its backward.

    Attributes:
        arrived: the tensors that the stage before sent; their gradients go back to it.
        sent: the tensors that the next stage or sections got; their gradients come back from there.
        losses: scalars whose gradient is 1.
        heads: the decoders of sections that got ``sent``; empty: the next stage did.
        delayed: weight gradients that the schedule computes by an action of their own; None: the backward does.
    """

    arrived: tuple[Tensor, ...]
    sent: tuple[Tensor, ...]
    losses: tuple[Tensor, ...]
    delayed: WeightGradients | None
    heads: Sequence[str] = ()


class Executor:
    """Runs the actions of a rank in one optimizer step.

    Args:
        model: parallelized, or on one process.
        batch: this rank's packs, and the step plan.
        weights: head -> weight of its loss; 1 where it is not given.
        on_output: see :func:`~omnitrain.parallel.schedule.accumulate.accumulate_gradients`.
        on_phase: see :func:`~omnitrain.parallel.schedule.accumulate.accumulate_gradients`.
        forward_context: a context around each forward.
        routers: the model's routers.
        recorder: records the actions while it is on.
        upcoming: the next step, some of whose items a section encodes in this one.
        trains: whether backwards follow, if the step has tokens to predict.
        on_encoded: called in place of the foundation's forwards, with a micro-batch, and its pack with features.
    """

    def __init__(
        self,
        model: OmniModel,
        batch: StepBatch,
        weights: Mapping[str, float],
        *,
        on_output: OnOutput | None = None,
        on_phase: OnPhase | None = None,
        forward_context: ForwardContext | None = None,
        routers: RouterMonitor | None = None,
        recorder: SpanRecorder | None = None,
        upcoming: StepBatch | None = None,
        trains: bool = True,
        on_encoded: OnEncoded | None = None,
    ) -> None:
        self._recorder = recorder if recorder is not None and recorder.is_on else None
        self._model, self._batch, self._weights = model, batch, weights
        self._on_output, self._on_phase, self._on_encoded = on_output, on_phase, on_encoded
        self._contexts = [c for c in (forward_context, routers.watched if routers is not None else None) if c]
        self._routers = routers
        self._layout = layout = layout_of(model)
        self._pipeline = None if layout is None else layout.pipeline
        self._last = 0 if self._pipeline is None else self._pipeline.stages.num_stages - 1
        # Tensor parallel ranks compute the same loss, which counts once.
        self._share = 1.0 if layout is None or layout.state.tp_rank == 0 else 0.0
        self._trains = trains and any(batch.plan.loss_counts.values())  # the same on all ranks: counts are global
        of_teachers = {name: batch.plan.rows_of(name) for name in model.compared}
        self._counts = batch.plan.loss_counts | of_teachers
        self._draws = StepDraws(model.device) if model.draws and model.training else None
        self._total = torch.zeros((), device=model.device)
        self._live: dict[_Key, _LiveMicroBatch] = {}
        self._delayed: dict[_Key, WeightGradients | None] = {}
        self._splits_backward = False
        self._forward_in: dict[_Key, Transfer] = {}
        self._backward_in: dict[_Key, Transfer] = {}
        self._forward_out: dict[_Key, tuple[Tensor, ...]] = {}
        self._backward_out: dict[_Key, tuple[Tensor, ...]] = {}
        self._messages: StageMessages | None = None
        self._held: HeldUnits | None = None
        self._graph = StepGraph(model, batch, self._draws, upcoming, trains=self._trains)
        self._heads = HeadsApart(model, batch, weights, self._graph.labels, share=self._share, trains=self._trains)

    def run(self, schedule: Schedule) -> Tensor:
        """Run the actions of this rank.

        Returns:
            This rank's part of the total loss, a scalar without gradient.
        """
        if not self._trains:
            schedule = without_backwards(schedule, encodes_only=self._on_encoded is not None)
        actions = schedule.actions[row_of(self._layout, schedule)]
        self._expect_features(schedule)
        self._splits_backward = any(action.kind is Kind.W for action in actions)
        with ExitStack() as stack:
            if self._pipeline is not None or schedule.sections:
                for pack in self._batch.packs:  # before any stage waits for another
                    self._model.runner.in_forward.require_whole_model(pack)
            if self._pipeline is not None:
                self._messages = self._open_messages()
            if any(action.kind in WEIGHTS for action in actions):
                stack.enter_context(self._held_units())
            for number, action in enumerate(actions):
                self._note(schedule, number, action)
                began = None if self._recorder is None else self._recorder.mark()
                self._RUN[action.kind](self, action)
                if self._recorder is not None:
                    self._recorder.add(What("action", str(action)), began, self._recorder.mark())
            if (self._pipeline is not None or schedule.sections) and self._on_phase is not None:
                self._on_phase(phase="optimizer")  # what is left waits for other ranks
            self._finish()
        return self._total

    @contextmanager
    def _held_units(self) -> Iterator[None]:
        """The schedule controls the weights of units in this context."""
        assert self._layout is not None
        self._held = self._layout.held
        with self._held.held():
            if self._pipeline is None:
                reduce_all_replicas(self._model)
            yield

    def _finish(self) -> None:
        """Wait for reductions and messages; nothing may be left."""
        if self._held is not None:
            self._held.finish()
        if self._pipeline is not None:
            self._pipeline.channel.finish()
        self._graph.finish()
        self._heads.finish()
        messages = (self._forward_in, self._forward_out, self._backward_in, self._backward_out)
        left = {key for kind in (self._live, self._delayed, *messages) for key in kind}
        assert not left, f"(stage, micro-batch) without all their actions: {left}"

    def _expect_features(self, schedule: Schedule) -> None:
        """Prepare for the messages between sections and the first stage."""
        if self._layout is None or not schedule.num_micro_batches:
            return
        for component, edge in self._layout.edges.items():
            row = schedule.actions[
                schedule.num_pipeline_ranks + list(self._layout.sections).index(self._layout.states[component].section)
            ]
            windows = [a.micro_batch for a in row if a.kind is Kind.SEND_F and a.component == component]
            edge.expect(self._batch.plan, [w for w in windows if w is not None], trains=self._trains)
        self._heads.expect(schedule)

    def _open_messages(self) -> StageMessages:
        layout = layout_of(self._model)
        assert layout is not None and self._pipeline is not None
        dtype = dtype_of(layout.components[FOUNDATION].plan.precision.compute) or self._model.dtype
        return StageMessages(self._model, self._pipeline, layout.state, self._batch.packs, dtype)

    def _forward(self, action: Action) -> None:
        stage, micro_batch = key = _key(action)
        pack = self._batch.packs[micro_batch].to(self._model.device)
        arrived = self._arrived(self._forward_in, key, requires_grad=self._trains)
        delayed = WeightGradients() if self._splits_backward else None
        with delaying(delayed):
            output = self._output(stage, micro_batch, pack, arrived)
        if not self._trains and stage == 0:
            self._graph.take_gradients(micro_batch)  # there are none: the features are not needed any more
        if self._on_encoded is not None:
            return
        sent: tuple[Tensor, ...] = ()
        if stage < self._last:
            sent = output
            self._hand_over(sent, self._forward_out, key, self._forward_in, stage + 1)
        elif output.apart:
            sent = self._heads.keep(micro_batch, output.apart)
        if self._trains:
            losses = self._loss(self._losses(output) if stage == self._last else [])
            heads = [*output.apart] if stage == self._last else []
            self._live[key] = _LiveMicroBatch(arrived, sent, losses, delayed, heads)
        if stage == self._last and self._on_output is not None:
            self._on_output(pack, output)

    def _output(self, stage: int, micro_batch: int, pack: Pack, arrived: tuple[Tensor, ...]) -> Any:
        """The output of a stage for a micro-batch."""
        given = encoded_pack(self._model, self._batch, micro_batch, pack)
        with ExitStack() as stack:
            if self._draws is not None:
                stack.enter_context(self._draws.forward(micro_batch))
            for context in self._contexts:
                stack.enter_context(context(given))
            if stage == 0 and self._held is None and isinstance(self._model, FSDPModule):
                self._model.unshard()  # the root may have parameters of components, which are called before it
            if stage in (0, self._last):
                features = self._graph.features_at_end if stage else self._graph.features_of
                given = replace(given, features=features(micro_batch, pack))
            if self._on_encoded is not None:
                return self._on_encoded(micro_batch, given)
            if self._messages is None:
                return self._model(given)
            return self._model(given, self._messages.input_of(stage, arrived))

    def _loss(self, losses: list[Tensor]) -> tuple[Tensor, ...]:
        """The sum of the losses of a stage and of its routers, which is part of the total; empty without any."""
        balance = None if self._routers is None else self._routers.loss()
        if balance is not None:
            losses = [*losses, balance]
        return self._counted(losses)

    def _counted(self, losses: list[Tensor]) -> tuple[Tensor, ...]:
        """The sum of losses, a part of the total; empty without any."""
        if not losses:
            return ()
        loss = torch.stack(losses).sum() * self._share
        self._total += loss.detach()
        return (loss,)

    def _losses(self, output: OmniOutput) -> list[Tensor]:
        # Sums over zero tokens enter, too: the backward of calls for other ranks hangs on the text's sum.
        weights, counts = self._weights, self._counts
        return [weights.get(name, 1.0) * term.sum / max(counts[name], 1) for name, term in output.losses.items()]

    def _backward(self, action: Action) -> None:
        key = stage, micro_batch = _key(action)
        live = self._live.pop(key)
        if self._held is None:
            reduce_replicas_in_last(self._model, self._batch, micro_batch)
        components = self._graph.with_backward(micro_batch) if stage == 0 else []
        with self._before(components):
            self._backward_of_stage(live, key)
        if stage == 0:
            self._graph.take_gradients(micro_batch)
        if self._held is not None:
            self._held.add_up()  # of units whose input has no gradient, such as embeddings
        for index, component in enumerate(components):
            with self._before(components[index + 1 :]):
                self._backward_of(component, micro_batch)
        if live.arrived:
            back = tuple(torch.zeros_like(t) if t.grad is None else t.grad for t in live.arrived)
            self._hand_over(back, self._backward_out, key, self._backward_in, stage - 1)

    def _backward_of_stage(self, live: _LiveMicroBatch, key: tuple[int, int]) -> None:
        gradients: list[Tensor | None] = [None] * len(live.losses)
        if live.heads:
            gradients += self._heads.take_gradients(live.heads, key[1])
        elif live.sent:
            gradients += self._arrived(self._backward_in, key)
        roots = (*live.losses, *live.sent)
        pairs = [pair for pair in zip(roots, gradients, strict=True) if pair[0].requires_grad]
        if pairs:  # none if only a tower trains and no rank has media for it
            torch.autograd.backward([root for root, _ in pairs], [gradient for _, gradient in pairs])

    def _before(self, components: Sequence[str]) -> AbstractContextManager[None]:
        """A context for a backward that backwards of components follow."""
        if not components or self._held is not None or self._layout is None:
            return nullcontext()
        of_components = (unit for name in components for unit in self._layout.components[name].units)
        return reducing_later(self._model, {"", *of_components})  # the root may have parameters of components, too

    def _backward_of(self, component: str, window: int) -> None:
        """Run the backward of a component's window."""
        if self._held is None and self._layout is not None:
            reduce_replicas(self._model, {component: self._batch.plan.last_active(component) == window})
        self._graph.backward(component, window)
        if self._held is not None:
            self._held.add_up()

    def _backward_of_inputs(self, action: Action) -> None:
        live = self._live[_key(action)]
        self._backward(action)
        self._delayed[_key(action)] = live.delayed

    def _backward_of_weights(self, action: Action) -> None:
        assert self._held is not None and action.stage is not None
        delayed = self._delayed.pop(_key(action))
        if delayed is not None:
            delayed.accumulate()
            self._held.add_up()

    def _forward_and_backward(self, action: Action) -> None:
        forward, backward = action.parts
        run_in_turns(
            partial(self._forward, forward),
            partial(self._backward, backward),
            self._model.device,
            draws=self._draws is not None,
        )

    def _encode(self, action: Action) -> None:
        self._graph.encode(action)

    def _exchange(self, action: Action) -> None:
        self._graph.exchange(action)

    def _backward_of_encoder(self, action: Action) -> None:
        assert action.micro_batch is not None
        self._backward_of(action.component, action.micro_batch)

    def _head(self, action: Action) -> None:
        assert action.micro_batch is not None
        self._heads.compute(action.component, action.micro_batch)
        if self._held is not None:
            self._held.add_up()

    def _send(self, action: Action) -> None:
        if action.stage is None:
            (self._graph if action.component == action.owner else self._heads).send(action)
            return
        assert self._messages is not None
        out = (self._forward_out if action.kind is Kind.SEND_F else self._backward_out).pop(_key(action))
        self._messages.send(action, out)

    def _receive(self, action: Action) -> None:
        if action.component != action.owner:
            self._receive_for_head(action)
            return
        if action.stage is None:
            self._graph.receive(action)
            return
        assert self._messages is not None
        inbox = self._forward_in if action.kind is Kind.RECV_F else self._backward_in
        inbox[_key(action)] = self._messages.receive(action)

    def _receive_for_head(self, action: Action) -> None:
        output = self._heads.receive(action)
        if output is None or action.micro_batch is None:
            return
        self._counted(self._losses(output))
        if output.losses and self._on_output is not None:
            self._on_output(self._batch.packs[action.micro_batch].to(self._model.device), output)

    def _unshard(self, action: Action) -> None:
        assert self._held is not None
        self._held.unshard(_owner(action))

    def _reshard(self, action: Action) -> None:
        assert self._held is not None
        self._held.reshard(_owner(action))

    def _reduce(self, action: Action) -> None:
        assert self._held is not None
        self._held.reduce(_owner(action))

    _RUN: Mapping[Kind, Callable[[Executor, Action], None]] = {
        Kind.F: _forward,
        Kind.B: _backward,
        Kind.I: _backward_of_inputs,
        Kind.W: _backward_of_weights,
        Kind.OVERLAP_F_B: _forward_and_backward,
        Kind.ENCODE: _encode,
        Kind.EXCHANGE: _exchange,
        Kind.ENCODE_B: _backward_of_encoder,
        Kind.HEAD: _head,
        Kind.SEND_F: _send,
        Kind.SEND_B: _send,
        Kind.RECV_F: _receive,
        Kind.RECV_B: _receive,
        Kind.UNSHARD: _unshard,
        Kind.RESHARD: _reshard,
        Kind.REDUCE: _reduce,
    }

    def _arrived(self, inbox: dict[_Key, Transfer], key: _Key, *, requires_grad: bool = False) -> tuple[Tensor, ...]:
        if key not in inbox:
            return ()
        return tuple(tensor.requires_grad_(requires_grad) for tensor in inbox.pop(key).wait())

    def _hand_over(
        self,
        tensors: tuple[Tensor, ...],
        outbox: dict[_Key, tuple[Tensor, ...]],
        key: _Key,
        inbox: dict[_Key, Transfer],
        to_stage: int,
    ) -> None:
        """Give what a stage made to another stage: to this rank's ``inbox``, or to ``outbox`` for a later send."""
        assert self._pipeline is not None
        if self._pipeline.stages.ranks[to_stage] == self._pipeline.stages.rank:
            inbox[to_stage, key[1]] = Transfer.here(tensor.detach() for tensor in tensors)
        else:
            outbox[key] = tensors

    def _note(self, schedule: Schedule, number: int, action: Action) -> None:
        """Tell the position of this rank before its action ``number``."""
        if self._on_phase is None:
            return
        layout = self._layout if self._pipeline is not None or schedule.sections else None
        place = None if layout is None else running_action(schedule, layout, number)
        for part in action.passes[-1:]:  # a pair begins with its backward
            _, micro_batch = _key(part)
            phase: Phase = "forward" if part.kind is Kind.F else "backward"
            samples = self._batch.packs[micro_batch].info.ids
            self._on_phase(micro_batch=micro_batch, phase=phase, samples=samples, action=place)
        if not action.passes and place is not None:
            self._on_phase(action=place)


def _key(action: Action) -> tuple[int, int]:
    assert action.stage is not None and action.micro_batch is not None
    return action.stage, action.micro_batch


def _owner(action: Action) -> int | str:
    """The stage or the encoder whose weights an action gathers, frees or reduces."""
    return action.component if action.stage is None else action.stage


def reduce_replicas_in_last(model: OmniModel, batch: StepBatch, micro_batch: int) -> None:
    """Make each component reduce over its replicas only in the last micro-batch in which it runs."""
    if layout_of(model) is not None:
        plan = batch.plan
        reduce_replicas(model, {c.name: plan.last_active(c.name) == micro_batch for c in plan.topology.components})

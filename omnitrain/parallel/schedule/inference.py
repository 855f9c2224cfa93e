"""Run a parallelized model without backwards: packs by the schedule of a step, generated tokens by stages in turn."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from omnitrain.data.packing.pack import Pack
from omnitrain.errors import UserError
from omnitrain.models.components.outputs import OmniOutput
from omnitrain.models.foundation.encoded_pack import EncodedPack
from omnitrain.models.foundation.stage import BlockSpan
from omnitrain.models.omni.inference import Inference, T, encoded_prompts
from omnitrain.models.omni.model import OmniModel
from omnitrain.models.omni.stage import StageInput
from omnitrain.parallel.fsdp.units import gathered
from omnitrain.parallel.pipeline.apply import Pipeline
from omnitrain.parallel.schedule.executor import Executor, OnEncoded, OnOutput
from omnitrain.parallel.schedule.table import schedule_of
from omnitrain.parallel.state import ParallelState
from omnitrain.parallel.step.media_dispatch import StepBatch
from omnitrain.parallel.step.plan import StepPlanner, step_planner
from omnitrain.parallel.step.rendezvous import DataProcessGroup, Rendezvous
from omnitrain.peers import GlooGroup, Peers, all_or_raise, told_error
from omnitrain.recipe.parallel import FOUNDATION
from omnitrain.torch_private import reset_after_error

_LEAST_PACKS = 4  # in a step: fewer would wait for each other at its ends


class InferenceOnRanks(Inference):
    """Runs a parallelized model without backwards.

    Args:
        model: parallelized.
        state: of this rank's section.
        held: the components of this rank.
        pipeline: the foundation's pipeline; None: it is not cut.
    """

    def __init__(
        self, model: OmniModel, state: ParallelState, held: Collection[str], pipeline: Pipeline | None
    ) -> None:
        self._model, self._state, self._held, self._pipeline = model, state, held, pipeline
        self.has_foundation, self.is_cut = FOUNDATION in held, pipeline is not None

    @property
    def peers(self) -> Peers:  # type: ignore[override]  # groups are made at the first use
        """See :class:`Inference`."""
        return self._groups[0]

    @property
    def sharing(self) -> Peers:  # type: ignore[override]
        """See :class:`Inference`."""
        return self._groups[1]

    @property
    def everyone(self) -> Peers:  # type: ignore[override]
        """See :class:`Inference`."""
        return self._groups[2]

    @cached_property
    def _groups(self) -> tuple[Peers, Peers, Peers]:
        """Made together, because all ranks must make each of them, also those that will not use it."""
        state = self._state
        return GlooGroup(state.all_groups("loss")), GlooGroup(state.all_groups("sequence")), GlooGroup()

    @cached_property
    def _planner(self) -> StepPlanner:
        everyone = self.everyone
        here = Rendezvous("", 0, everyone.rank, everyone.size)
        peers = DataProcessGroup(here, everyone.group)
        return replace(step_planner(self._model, here), peers=peers, reorders=False)

    def require(self, component: str) -> None:
        """See :class:`Inference`."""
        if component not in self._held:
            raise UserError(
                f"rank {self._state.rank} does not have {component}, which is on other ranks, and a forward by itself "
                "does not run them: call accumulate_gradients, heldout_loss or generate on all ranks"
            )

    def require_heads(self, decoders: Collection[str]) -> None:
        """See :class:`Inference`."""
        if apart := [name for name in decoders if self.has_foundation and name not in self._held]:
            raise UserError(
                f"{apart[0]} is in a section, where it computes losses, but the tokens of an answer are drawn beside "
                "the foundation; save the model, and generate without that section, such as with omnitrain generate"
            )

    def evaluate(
        self,
        model: OmniModel,
        packs: Sequence[Pack],
        take: Callable[[Pack, OmniOutput], object],
        notify: Callable[[int], object],
    ) -> None:
        """See :class:`Inference`."""
        for number, batch in self._steps(packs):
            notify(number)
            self._run(batch, on_output=take)

    def encode(self, model: OmniModel, packs: Sequence[Pack], wanted: Collection[int]) -> dict[int, EncodedPack]:
        """See :class:`Inference`."""
        found: dict[int, EncodedPack] = {}

        def keep(first: int, index: int, given: EncodedPack) -> None:
            if first + index in wanted:
                found[first + index] = encoded_prompts(model, given)

        for first, batch in self._steps(packs):
            self._run(replace(batch, is_sliced=False), on_encoded=partial(keep, first))
        return self.from_first(lambda: found) if self.has_foundation else found

    def gathered(self, model: OmniModel) -> AbstractContextManager[None]:
        """See :class:`Inference`."""
        return gathered(model)

    def _steps(self, packs: Sequence[Pack]) -> Iterator[tuple[int, StepBatch]]:
        """Yield the number of packs before each step, and the step, until no rank has packs left."""
        if self.is_cut or len(self._held) < len(self._model.components):  # before any rank waits for another
            all_or_raise(self.everyone, lambda: [*map(self._model.runner.in_forward.require_whole_model, packs)])
        size = _LEAST_PACKS if self._pipeline is None else max(_LEAST_PACKS, 2 * self._pipeline.stages.num_stages)
        for first in count(0, size):
            batch = self._planner(packs[first : first + size])
            if not batch.plan.num_micro_batches:
                return
            yield first, batch

    def _run(self, batch: StepBatch, *, on_output: OnOutput | None = None, on_encoded: OnEncoded | None = None) -> None:
        """Run a step without its backwards; then all weights are sharded again."""
        executor = Executor(self._model, batch, {}, on_output=on_output, on_encoded=on_encoded, trains=False)
        with torch.no_grad(), _sharded_afterwards(self._model):
            executor.run(schedule_of(self._model, batch.plan))

    # Generated tokens: the stages of a pipeline in turn. No plan has the shapes of their messages, so these go first.

    def run(self, forward: Callable[[StageInput | None], Any]) -> Any:
        """Run the stages of this rank, each when the output of the stage before has arrived."""
        if self._pipeline is None:
            return super().run(forward)
        stages = self._pipeline.stages
        output: Any = ()
        for stage in stages.local:
            if stage and stages.ranks[stage - 1] != stages.rank:
                output = self._received(self._pipeline, stage)
            output = forward(StageInput(BlockSpan(*stages.spans[stage], stages.spans[-1][1]), output))
            if not stages.is_last(stage) and stages.ranks[stage + 1] != stages.rank:
                self._send(self._pipeline, stage + 1, output)
        self._pipeline.channel.finish()
        return output if stages.rank == stages.last_rank else None

    def from_first(self, make: Callable[[], T]) -> T:
        """See :class:`Inference`."""
        return make() if self._pipeline is None else self._broadcast(self._pipeline, 0, make)

    def from_last(self, make: Callable[[], T]) -> T:
        """See :class:`Inference`."""
        return make() if self._pipeline is None else self._broadcast(self._pipeline, -1, make)

    def _send(self, pipeline: Pipeline, stage: int, tensors: Sequence[Tensor]) -> None:
        peer, layout = pipeline.stages.ranks[stage], [(tensor.shape, tensor.dtype) for tensor in tensors]
        dist.send_object_list([layout], group=pipeline.column.group, group_dst=peer)
        pipeline.channel.send("F", tensors, peer, stage)

    def _received(self, pipeline: Pipeline, stage: int) -> tuple[Tensor, ...]:
        peer = pipeline.stages.ranks[stage - 1]
        layout: list[Any] = [None]
        dist.recv_object_list(layout, group=pipeline.column.group, group_src=peer)
        buffers = [torch.empty(shape, dtype=dtype, device=self._model.device) for shape, dtype in layout[0]]
        return pipeline.channel.receive("F", buffers, peer, stage).wait()

    def _broadcast(self, pipeline: Pipeline, stage: int, make: Callable[[], T]) -> T:
        """Return what ``make`` returns on the rank of a stage; its error is raised on the other ranks, too."""
        message: list[Any] = [None]
        source, group = pipeline.stages.ranks[stage], pipeline.column.group
        if pipeline.stages.rank != source:
            dist.broadcast_object_list(message, group=group, group_src=source)
            return self._loaded(message[0])
        try:
            made = make()
            message[0] = _saved(made, self._model.device)
            return made
        except Exception as error:
            message[0] = told_error(error, dist.get_rank())
            raise
        finally:
            dist.broadcast_object_list(message, group=group, group_src=source)

    def _loaded(self, received: Any) -> Any:
        if isinstance(received, Exception):
            raise received
        device, saved = received
        return torch.load(io.BytesIO(saved), map_location={device: str(self._model.device)}, weights_only=False)


def _saved(value: object, device: torch.device) -> tuple[str, bytes]:
    """Return the device of the tensors of a value that are not on the host, and the value as bytes."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return str(device), stream.getvalue()


@contextmanager
def _sharded_afterwards(model: OmniModel) -> Iterator[None]:
    """At the end all units are sharded: without a backward, FSDP keeps the weights of the root gathered."""
    try:
        yield
    except BaseException:
        reset_after_error(model)
        raise
    finally:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

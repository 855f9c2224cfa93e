"""Run the stages of a pipeline in turn, for evaluation and generation, which have no schedule."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from omnitrain.models.foundation.stage import BlockSpan
from omnitrain.models.omni.stage import OneStage, StageInput, T
from omnitrain.parallel.pipeline.apply import Pipeline
from omnitrain.peers import told_error


class PipelineRelay(OneStage):
    """The stages of a pipeline in turn. There is no step plan with the shapes of messages, so they are sent first."""

    is_cut = True

    def __init__(self, pipeline: Pipeline, device: torch.device) -> None:
        self._stages, self._channel = pipeline.stages, pipeline.channel
        self._column, self._device = pipeline.column, device

    def run(self, forward: Callable[[StageInput | None], Any]) -> Any:
        """Run the stages of this rank, each when the output of the stage before has arrived."""
        stages = self._stages
        count = stages.spans[-1][1]
        output: Any = ()
        for stage in stages.local:
            if stage and stages.ranks[stage - 1] != stages.rank:
                output = self._received(stage)
            output = forward(StageInput(BlockSpan(*stages.spans[stage], count), output))
            if not stages.is_last(stage) and stages.ranks[stage + 1] != stages.rank:
                self._send(stage + 1, output)
        self._channel.finish()
        return output if stages.rank == stages.last_rank else None

    def from_first(self, make: Callable[[], T]) -> T:
        """See :class:`OneStage`."""
        return self._broadcast(self._stages.first_rank, make)

    def from_last(self, make: Callable[[], T]) -> T:
        """See :class:`OneStage`."""
        return self._broadcast(self._stages.last_rank, make)

    def _send(self, stage: int, tensors: Sequence[Tensor]) -> None:
        peer, layout = self._stages.ranks[stage], [(tensor.shape, tensor.dtype) for tensor in tensors]
        dist.send_object_list([layout], group=self._column.group, group_dst=peer)
        self._channel.send("F", tensors, peer, stage)

    def _received(self, stage: int) -> tuple[Tensor, ...]:
        peer = self._stages.ranks[stage - 1]
        layout: list[Any] = [None]
        dist.recv_object_list(layout, group=self._column.group, group_src=peer)
        buffers = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in layout[0]]
        return self._channel.receive("F", buffers, peer, stage).wait()

    def _broadcast(self, source: int, make: Callable[[], T]) -> T:
        message: list[Any] = [None]
        if self._stages.rank != source:
            dist.broadcast_object_list(message, group=self._column.group, group_src=source)
            return self._loaded(message[0])
        try:
            made = make()
            message[0] = _saved(made, self._device)
            return made
        except Exception as error:  # raised on the other ranks, too
            message[0] = told_error(error, dist.get_rank())
            raise
        finally:
            dist.broadcast_object_list(message, group=self._column.group, group_src=source)

    def _loaded(self, received: Any) -> Any:
        if isinstance(received, Exception):
            raise received
        device, saved = received
        return torch.load(io.BytesIO(saved), map_location={device: str(self._device)}, weights_only=False)


def _saved(value: object, device: torch.device) -> tuple[str, bytes]:
    """Return the device of the tensors of a value that are not on the host, and the value as bytes."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return str(device), stream.getvalue()

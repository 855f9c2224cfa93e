"""What crosses the cuts of a pipeline in a step: all shapes follow from the packs, which every stage has."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from omnitrain.data.packing.pack import Pack
from omnitrain.errors import UserError
from omnitrain.models.foundation.stage import BlockSpan
from omnitrain.models.omni.model import OmniModel
from omnitrain.models.omni.stage import StageInput, features_across
from omnitrain.parallel.pipeline.apply import Pipeline
from omnitrain.parallel.sections.carriers.torch_p2p import Transfer
from omnitrain.parallel.sequence.apply import slice_of
from omnitrain.parallel.state import ParallelState
from omnitrain.plan.schedule.actions import Action, Kind


class StageMessages:
    """The messages between stages in one step.

    A stage sends its hidden states ``[1, t, hidden]`` of ``dtype``, and the features ``[n, hidden]`` that later stages
    read. Their gradients, of the same shapes, come back. All stages have the ``packs``.
    """

    def __init__(
        self, model: OmniModel, pipeline: Pipeline, state: ParallelState, packs: Sequence[Pack], dtype: torch.dtype
    ) -> None:
        self._model, self._pipeline, self._state, self._packs = model, pipeline, state, packs
        self._dtype = dtype
        self._hidden = model.foundation.get_input_embeddings().weight.size(1)
        self._count = pipeline.stages.spans[-1][1]
        self.shapes = cache(self._shapes)

    def input_of(self, stage: int, arrived: Sequence[Tensor]) -> StageInput:
        """Return the input of a stage's forward. ``arrived``: what the stage before sent; nothing for the first."""
        return StageInput(BlockSpan(*self._pipeline.stages.spans[stage], self._count), tuple(arrived))

    def send(self, action: Action, tensors: Sequence[Tensor]) -> None:
        """Send what an action's stage made: its output, or the gradient of its input."""
        assert action.stage is not None and action.micro_batch is not None and action.peer is not None
        is_forward = action.kind is Kind.SEND_F
        later = action.stage + 1 if is_forward else action.stage
        self._require(later, action.micro_batch, tensors)
        self._pipeline.channel.send("FB"[not is_forward], tensors, action.peer, self._tag(later, action))

    def receive(self, action: Action) -> Transfer:
        """Post the receive of a stage's input, or of the gradient of its output."""
        assert action.stage is not None and action.micro_batch is not None and action.peer is not None
        is_forward = action.kind is Kind.RECV_F
        later = action.stage if is_forward else action.stage + 1
        device = self._model.device
        buffers = [
            torch.empty(shape, dtype=self._dtype, device=device) for shape in self.shapes(later, action.micro_batch)
        ]
        return self._pipeline.channel.receive("FB"[not is_forward], buffers, action.peer, self._tag(later, action))

    def _shapes(self, later: int, micro_batch: int) -> tuple[tuple[int, ...], ...]:
        """The shapes of the tensors between stage ``later`` and the one before it."""
        pack = self._packs[micro_batch]
        sequence_slice = slice_of(self._state, pack.num_tokens, torch.device("cpu"))
        tokens = pack.num_tokens if sequence_slice is None else len(sequence_slice.host_positions)
        numbers = features_across(self._model, pack, sequence_slice, self._pipeline.stages.spans[later][0])
        return (1, tokens, self._hidden), *((number, self._hidden) for number in numbers.values())

    def _require(self, later: int, micro_batch: int, tensors: Sequence[Tensor]) -> None:
        """The receiver relies on shapes and dtypes."""
        found = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        expected = [(shape, self._dtype) for shape in self.shapes(later, micro_batch)]
        if found != expected:
            raise UserError(
                f"{type(self._model.foundation).__name__} sends {found} from stage {later - 1} to stage {later}, but a "
                f"pipeline expects {expected}; set pp to 1"
            )

    def _tag(self, later: int, action: Action) -> int:
        assert action.micro_batch is not None
        is_backward = action.kind in (Kind.SEND_B, Kind.RECV_B)
        return (2 * later + is_backward) * len(self._packs) + action.micro_batch

"""Cut a model into pipeline stages: what each rank keeps, the groups in which stages communicate, and their channel."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from omnitrain.data.packing.pack import Pack
from omnitrain.errors import UserError
from omnitrain.groups import new_group
from omnitrain.models.foundation.stage import BlockSpan
from omnitrain.models.omni.model import OmniModel
from omnitrain.models.omni.stage import StageInput, features_across
from omnitrain.ops.collectives import all_reduce_in_buckets
from omnitrain.parallel.meshes import mesh_group
from omnitrain.parallel.pipeline.stages import (
    PipelineStages,
    holders,
    ignore_absent_in_device,
    path_of_blocks,
    stages_of,
)
from omnitrain.parallel.sections.carriers.torch_p2p import Transfer, connect, receive_tensors, send_tensors
from omnitrain.parallel.sequence.apply import slice_of
from omnitrain.parallel.state import ParallelState
from omnitrain.peers import GlooGroup, Peers, gloo_group_of
from omnitrain.plan.schedule.actions import Action, Kind
from omnitrain.recipe.parallel import ComponentPlan
from omnitrain.recipe.plan_groups import PipelineSchedule

Direction = tuple[str, int, int]  # "F" (hidden states) or "B" (their gradients); pipeline ranks that send and receive


class StageChannel:
    """Messages between this rank and others of its column; ``groups`` are by direction, ``ranks`` by pipeline rank."""

    def __init__(self, groups: Mapping[Direction, dist.ProcessGroup], ranks: Sequence[int], rank: int) -> None:
        self._groups, self._ranks, self._rank = groups, ranks, rank
        self._sent: dict[tuple[str, int], list[Transfer]] = {}

    def send(self, kind: str, tensors: Sequence[Tensor], peer: int, tag: int) -> None:
        """Begin to send tensors of any shapes, not to be changed before :meth:`finish`; ``tag`` is below 2**20."""
        self._free((kind, peer))
        sent = send_tensors(tensors, *self._end(kind, self._rank, peer, peer), tag)
        self._sent.setdefault((kind, peer), []).append(sent)

    def receive(self, kind: str, like: Sequence[Tensor], peer: int, tag: int) -> Transfer:
        """Post the receives of a message from ``peer`` into ``like``, buffers with its shapes, dtypes and device."""
        return receive_tensors(like, *self._end(kind, peer, self._rank, peer), tag)

    def _end(self, kind: str, sender: int, receiver: int, peer: int) -> tuple[dist.ProcessGroup, int]:
        """The group of a direction, and the rank of ``peer`` in it."""
        group = self._groups[kind, sender, receiver]
        return group, dist.get_group_rank(group, self._ranks[peer])

    def _free(self, of: tuple[str, int]) -> None:
        """Free the messages of a kind to a peer that have left.

        Gloo never reports a send as complete, so we wait for it. A validated schedule completes even if each send waits
        for its receive at once; this waits later, before the next send of the kind to this peer.
        """
        sent = self._sent.get(of, [])
        for transfer in sent:
            if any(tensor.device.type == "cpu" for tensor in transfer.tensors):
                transfer.wait()
        self._sent[of] = [transfer for transfer in sent if not transfer.has_ended]

    def finish(self) -> None:
        """Wait until everything that was sent has left, and free it."""
        for sent in self._sent.values():
            for transfer in sent:
                transfer.wait()
        self._sent.clear()


def directions(stage_ranks: Sequence[int]) -> list[Direction]:
    """Return the messages between stages, given the pipeline rank of each stage; in one order on all ranks."""
    pairs = sorted({pair for pair in pairwise(stage_ranks) if pair[0] != pair[1]})
    return [("F", *pair) for pair in pairs] + [("B", later, earlier) for earlier, later in pairs]


def connect_pairs(
    columns: np.ndarray, of: Sequence[Direction], device: torch.device
) -> dict[Direction, dist.ProcessGroup]:
    """Make a group for each direction between two ranks of each column, and connect its ranks. All ranks must call it.

    NCCL runs the messages of a group in the order in which they were posted, and connects two ranks at their first one:
    the rank that posts it waits on the host until the other rank comes. If two ranks begin with different directions,
    as 1F1B's do, both would wait for ever (``connected`` of :func:`~omnitrain.plan.schedule.simulate.simulate`).
    ``columns`` are ``[n, pipeline ranks]``; directions have one order on all ranks. Returns the groups that have this
    rank.
    """
    made = {}
    backend = "nccl" if device.type == "cuda" else "gloo"  # that of the run would also have sockets of the host
    for kind, sender, receiver in of:
        for ends in columns[:, [sender, receiver]].tolist():
            group = new_group(ends, "pp", backend)
            if group is not None:
                made[kind, sender, receiver] = group, ends
    for group, (source, target) in made.values():
        connect(group, [source], [target], device)
    return {direction: group for direction, (group, _) in made.items()}


@dataclass(frozen=True, eq=False)
class Pipeline:
    """The pipeline of a parallelized model."""

    stages: PipelineStages  # the cut, and the stages of this rank
    schedule: PipelineSchedule  # how a step runs through the stages
    group: dist.ProcessGroup  # this rank's column of the mesh: one rank of each pipeline rank, with the same samples
    column: Peers  # the same ranks, on the host
    channel: StageChannel  # messages between stages
    held_by: Mapping[str, tuple[int, ...]]  # parameter -> the pipeline ranks that hold it
    # set of pipeline ranks that hold the same parameters -> their group, if this rank is one of them
    shared: Mapping[tuple[int, ...], dist.ProcessGroup]

    def __str__(self) -> str:
        return f"pp {max(self.stages.ranks) + 1}"

    def held_by_several(self, model: OmniModel) -> dict[str, nn.Parameter]:
        """The parameters that several stages hold."""
        return {name: parameter for name, parameter in model.named_parameters() if len(self.held_by[name]) > 1}

    def counted_elsewhere(self, shared: Mapping[str, nn.Parameter]) -> set[nn.Parameter]:
        """The parameters of ``shared`` on this rank that another stage has, too, and counts."""
        return {parameter for name, parameter in shared.items() if self.stages.rank in self.held_by[name][1:]}

    @property
    def absent(self) -> frozenset[str]:
        """The parameters that only other pipeline ranks hold."""
        return frozenset(name for name, ranks in self.held_by.items() if self.stages.rank not in ranks)


def cut_into_stages(
    model: OmniModel, plan: ComponentPlan, state: ParallelState, on_all: Collection[str] = ()
) -> Pipeline | None:
    """Cut a model as its plan says, and make the groups of the pipeline. All ranks must call it.

    Returns None without a pipeline, and on the ranks of other sections. Tensors are not sharded yet; ``on_all``:
    encoders that run on all pipeline ranks.
    """
    if state.size("pp") == 1:
        return None
    schedule = plan.schedule or PipelineSchedule()
    stages = stages_of(model, schedule, state)
    held_by = holders(model, stages, model.stage_contract.readers, on_all)
    columns = state.groups("pp")
    is_on_cpu = state.device_type == "cpu" or dist.get_backend() == "gloo"
    between = directions(stages.ranks)
    device = torch.device(state.device_type)
    pairs = {} if is_on_cpu else connect_pairs(columns, between, device)  # gloo tells messages apart by tags
    partly = sorted({ranks for ranks in held_by.values() if 1 < len(ranks) < state.size("pp")})
    made = {ranks: [mesh_group(own, "pp") for own in columns[:, list(ranks)].tolist()] for ranks in partly}
    if dist.get_rank() not in state.ranks:
        gloo_group_of(columns.tolist())
        return None
    column = GlooGroup(columns.tolist())
    ignore_absent_in_device()
    group = state.pp_mesh.get_group()
    shared = {ranks: one for ranks, groups in made.items() for one in groups if one is not None}
    shared |= {ranks: group for ranks in held_by.values() if len(ranks) == state.size("pp")}
    channel = StageChannel(dict.fromkeys(between, group) | pairs, dist.get_process_group_ranks(group), stages.rank)
    return Pipeline(stages, schedule, group, column, channel, held_by, shared)


def units_by_stage(
    model: OmniModel, stages: PipelineStages | None, of_encoders: Collection[str] = ()
) -> dict[int, tuple[str, ...]]:
    """Return stage of this rank -> its FSDP units, in the order of modules; None: the model is one stage.

    Units outside of blocks, such as embeddings, belong to this rank's first stage, whose backward is the last one.
    """
    names = (name for name, module in model.named_modules() if isinstance(module, FSDPModule))
    units = [name for name in names if name not in of_encoders]
    if stages is None:
        return {0: tuple(units)}
    of_blocks = {block: s for block, s in stages.of_blocks(path_of_blocks(model)).items() if s in stages.local}
    of_stages: dict[int, list[str]] = {stage: [] for stage in stages.local}
    for name in units:
        inside = (stage for block, stage in of_blocks.items() if f"{name}.".startswith(block))
        of_stages[next(inside, stages.local[0])].append(name)
    return {stage: tuple(names) for stage, names in of_stages.items()}


def keep_on_first_stage(shared: Mapping[str, nn.Parameter], pipeline: Pipeline) -> None:
    """Let one stage alone keep earlier gradients before a backward: :func:`add_up_over_stages` then adds them once."""
    for name, parameter in shared.items():
        if parameter.grad is not None and pipeline.held_by[name][0] != pipeline.stages.rank:
            parameter.grad.zero_()


def add_up_over_stages(shared: Mapping[str, nn.Parameter], pipeline: Pipeline) -> None:
    """Sum the gradients of parameters that several stages hold, such as tied embeddings.

    Call it once per optimizer step, after the gradients are reduced. Each of these ranks then has the whole gradient
    and makes the same update. A parameter without a gradient on any of them has none afterwards.
    """
    trained = {name: parameter for name, parameter in shared.items() if parameter.requires_grad}
    if not trained:
        return
    is_wanted = pipeline.column.any_of_each([parameter.grad is not None for parameter in trained.values()])
    by_ranks: dict[tuple[int, ...], list[torch.Tensor]] = {ranks: [] for ranks in pipeline.shared}
    for (name, parameter), wanted in zip(trained.items(), is_wanted, strict=True):
        ranks = pipeline.held_by[name]
        if wanted and ranks in by_ranks:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            by_ranks[ranks].append(parameter.grad)
    for ranks, gradients in by_ranks.items():
        all_reduce_in_buckets(gradients, pipeline.shared[ranks])


_AT_ONCE = 16  # tensors in a message


def whole_over_stages(values: Mapping[str, Tensor | None], pipeline: Pipeline | None) -> dict[str, Tensor | None]:
    """Return whole tensors on the CPU, on all ranks. All ranks must call it.

    ``values``: parameter -> its value, its gradient, or None, in one order on all ranks; only those of stages that hold
    the parameter count.
    """
    if pipeline is None:
        return {name: _whole(value) for name, value in values.items()}
    whole: dict[str, Tensor | None] = {}
    for source in sorted({pipeline.held_by[name][0] for name in values}):
        names = [name for name in values if pipeline.held_by[name][0] == source]
        for start in range(0, len(names), _AT_ONCE):
            some = names[start : start + _AT_ONCE]
            # A stage that holds them, too, must gather its shards with the others of its mesh.
            sent: list[Any] = [
                _whole(values[name]) if pipeline.stages.rank in pipeline.held_by[name] else None for name in some
            ]
            dist.broadcast_object_list(sent, group=pipeline.group, group_src=source)
            whole |= dict(zip(some, sent, strict=True))
    return {name: whole[name] for name in values}


def _whole(value: Tensor | None) -> Tensor | None:
    if value is None:
        return None
    whole: Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.detach().to("cpu", copy=True)


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

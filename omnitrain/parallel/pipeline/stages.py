"""The stages of a pipeline: which blocks of the foundation each rank computes, and which parameters it holds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from torch.utils import swap_tensors
from transformers import PreTrainedModel

from omnitrain.models.adapters.lora import names_without_adapters
from omnitrain.models.contract.tiny_model import CHOSEN_EXPERTS
from omnitrain.models.discovery.text_run import text_blocks
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.config_value import config_value
from omnitrain.ops.experts.weights import experts_in, num_experts_of
from omnitrain.parallel.state import ParallelState
from omnitrain.plan.schedule.generators import stage_ranks
from omnitrain.plan.schedule.split import split_by_cost, split_by_numbers
from omnitrain.recipe.parallel import FOUNDATION
from omnitrain.recipe.plan_groups import PipelineSchedule


@dataclass(frozen=True)
class PipelineStages:
    """The cut of a foundation into stages."""

    spans: tuple[tuple[int, int], ...]  # for each stage, its first block and the block after its last one
    # for each stage, the active parameters per token in its blocks, and on the last in the head
    costs: tuple[float, ...]
    ranks: tuple[int, ...]  # for each stage, the pipeline rank that computes it
    rank: int  # pipeline rank of this process

    @property
    def num_stages(self) -> int:
        """Number of stages, over all ranks."""
        return len(self.spans)

    @property
    def first_rank(self) -> int:
        """The pipeline rank with the embeddings and the encoders."""
        return self.ranks[0]

    @property
    def last_rank(self) -> int:
        """The pipeline rank with the heads."""
        return self.ranks[-1]

    @cached_property
    def local(self) -> tuple[int, ...]:
        """The stages of this rank, ascending."""
        return tuple(stage for stage, rank in enumerate(self.ranks) if rank == self.rank)

    def of_blocks(self, path: str) -> dict[str, int]:
        """Return the start of the names in each block of the module list at ``path`` -> the stage of the block."""
        return {f"{path}.{block}.": s for s, span in enumerate(self.spans) for block in range(*span)}

    def is_last(self, stage: int) -> bool:
        """Whether the stage computes the losses."""
        return stage == self.num_stages - 1


def stages_of(model: OmniModel, schedule: PipelineSchedule, state: ParallelState) -> PipelineStages:
    """Return the stages of a model: as many blocks as the schedule says, else of equal cost; or raise ScheduleError.

    The cost of a block is its number of active parameters per token; the last stage has that of the head, too.
    """
    ranks = ranks_of_stages(schedule, state.size("pp"))
    cuts = model.stage_contract.cuts
    blocks, head = parameters_met(model)
    if schedule.split is not None:
        spans = split_by_numbers(schedule.split, len(blocks), len(ranks), legal_cuts=cuts)
    else:
        spans = split_by_cost(blocks, ranks, last=head, legal_cuts=cuts)
    costs = [sum(blocks[start:stop]) for start, stop in spans]
    costs[-1] += head
    return PipelineStages(spans, tuple(costs), ranks, state.pp_rank)


def ranks_of_stages(schedule: PipelineSchedule | None, num_ranks: int) -> tuple[int, ...]:
    """Return the pipeline rank of each stage; None: each of ``num_ranks`` has one."""
    schedule = schedule or PipelineSchedule()
    return stage_ranks(num_ranks, schedule.stages_per_rank, is_v=schedule.kind == "zbv")


def parameters_met(model: OmniModel) -> tuple[list[float], float]:
    """Return the active parameters per token of each block, sharded or not, and of the head; equal on all ranks."""
    text = model.foundation.config.get_text_config(decoder=True)
    chosen = next((number for name in CHOSEN_EXPERTS if (number := config_value(text, name))), None)
    blocks = [_cost(block, chosen) for block in text_blocks(model.foundation)]
    return blocks, float(sum(weight.numel() for weight in model.foundation.get_output_embeddings().parameters()))


def _cost(block: nn.Module, chosen: int | None) -> float:
    """The active parameters per token of a block. ``chosen``: experts per token; None: all of them."""
    cost = float(sum(weight.numel() for weight in block.parameters()))
    for _, experts in experts_in(block):
        weights, number = sum(weight.numel() for weight in experts.parameters(recurse=False)), num_experts_of(experts)
        cost -= weights * (1 - min(chosen or number, number) / number)
    return cost


def path_of_blocks(model: OmniModel) -> str:
    """Return the name of the module list that has the foundation's blocks."""
    blocks = text_blocks(model.foundation)
    (path,) = {name for name, module in model.foundation.named_modules() if module is blocks}
    return f"{FOUNDATION}.{path}"


def holders(
    model: OmniModel, stages: PipelineStages, read_by: Mapping[str, Collection[str]], on_all: Collection[str] = ()
) -> dict[str, tuple[int, ...]]:
    """Return parameter -> the pipeline ranks that hold it, ascending.

    A block is on the rank of its stage. Encoders are on the first stage, or on all ranks; teachers on the last, with
    their output layers, or on all; decoders, which embed targets and predict them, on the first and the last; the
    foundation's others where stages (``first``, ``inner``, ``last``) read them.
    """
    at = {"first": {stages.first_rank}, "last": {stages.last_rank}, "inner": set(stages.ranks[1:-1])}
    of_blocks = stages.of_blocks(path_of_blocks(model))
    ranks: dict[str, tuple[int, ...]] = {}
    components = {name: component for component, names in model.components.items() for name in names}
    bases = {name: base for base, name in names_without_adapters(model, components).items()}
    bases |= {adapter: base for base, names in model.renamed.items() for adapter in names[1:]}
    for name, component in components.items():
        base = bases[name].removeprefix(f"{FOUNDATION}.")
        inside = next((stage for prefix, stage in of_blocks.items() if name.startswith(prefix)), None)
        if component in on_all:
            held = set(stages.ranks)
        elif component in model.decoder_names:
            held = at["first"] | at["last"]
        elif name.partition(".")[0] in model.teachers:
            held = at["last"]
        elif component != FOUNDATION:
            held = at["first"]
        elif inside is not None:
            held = {stages.ranks[inside]}
        else:
            held = {rank for position in read_by.get(base, ("first",)) for rank in at[position]}
        ranks[name] = tuple(sorted(held))
    return ranks


def ignore_absent_in_device() -> None:
    """Let transformers models make tensors on the device of a parameter that is not absent."""
    PreTrainedModel.device = property(_device_of_present)


def _device_of_present(model: PreTrainedModel) -> torch.device:
    return next((weight.device for weight in model.parameters() if not weight.is_meta), torch.device("meta"))


def drop_parameters(model: nn.Module, names: Collection[str]) -> None:
    """Move parameters to the meta device, where they keep their shapes and take no memory.

    Every reference to such a parameter in the model changes, too.
    """
    parameters = dict(model.named_parameters())
    for name in names:
        on_meta = nn.Parameter(torch.empty_like(parameters[name], device="meta"), parameters[name].requires_grad)
        swap_tensors(parameters[name], on_meta)

"""``ot.prepare``: a model on its ranks, the steps of its data and an optimizer, for a training loop of your own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from omnitrain.data.loading.dataset_loader import DatasetLoader
from omnitrain.data.loading.loader import StepLoader, build_dataloader
from omnitrain.data.packing.pack import Pack
from omnitrain.data.render.packing_collator import OmniDataCollatorWithPacking
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.render.template_renderer import TemplateRenderer
from omnitrain.data.sources.rows import open_sources
from omnitrain.errors import UserError
from omnitrain.models.adapters.lora import token_matrices
from omnitrain.models.omni.encode import idle_prompt
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.loss.token_functions import TokenFunction
from omnitrain.optim.adamw import require_fp32, trained_parameters
from omnitrain.optim.build import decayed_parameters
from omnitrain.optim.offload import Groups, OffloadedOptimizer
from omnitrain.parallel.layout import layout_of
from omnitrain.parallel.parallelize import build_parallelize_model
from omnitrain.parallel.schedule.accumulate import accumulate_gradients
from omnitrain.parallel.state import ParallelState, init_state_of
from omnitrain.parallel.step.media_dispatch import StepBatch
from omnitrain.parallel.step.plan import StepPlanner, step_planner
from omnitrain.peers import GlooGroup, all_or_raise
from omnitrain.recipe import Data, DataSource, ParallelPlan
from omnitrain.recipe.parallel import MAIN
from omnitrain.train.build_from_recipe import install_losses, trainable_media

MakeOptimizer = Callable[[Groups], torch.optim.Optimizer]


@dataclass(frozen=True, eq=False)
class PreparedLoop:
    """A training loop, made by :func:`prepare`. Iterating it yields the steps of this rank: of a dataset, one epoch."""

    model: OmniModel  # on its ranks, in training mode
    processor: OmniProcessor | None  # turns rows into samples. None: the collate function gets the rows
    loader: DatasetLoader | StepLoader  # the packs of this rank; its state continues after the last step
    optimizer: Any  # of torch. None: none was asked for
    state: ParallelState
    _plan_step: StepPlanner
    _peers: GlooGroup

    def __iter__(self) -> Iterator[StepBatch]:
        """Yield steps, planned with all ranks, which must iterate together; TrainingError: another rank failed."""
        with contextlib.closing(self._packs()) as own:
            while True:
                packs = all_or_raise(self._peers, partial(next, own, None))
                is_end = not self._peers.any(packs is not None)
                if self.state.section != MAIN and isinstance(self.loader, DatasetLoader):
                    self.loader.advance(is_end=is_end)
                if is_end:
                    return
                batch = self._plan_step(packs or [])
                if batch.plan.num_micro_batches:  # otherwise all rows of the step were rejected
                    yield batch

    def __len__(self) -> int:
        """Return the steps of an epoch; TypeError: the data have no end, or an unknown one."""
        return len(self.loader)  # type: ignore[arg-type]

    def _packs(self) -> Generator[list[Pack], None, None]:
        """Yield the packs of each step; a section of encoders draws none."""
        if self.state.section == MAIN:
            yield from map(list, self.loader)

    def forward_backward(self, batch: StepBatch, **options: Any) -> torch.Tensor:
        """Add the gradients of a step; ``options`` and errors as of :func:`accumulate_gradients`.

        Returns:
            The loss of the step over all ranks, a scalar without gradient, equal on every rank.
        """
        loss = accumulate_gradients(self.model, batch, **options)
        dist.all_reduce(loss)
        return loss


def prepare(
    model: PreTrainedModel,
    data: Any,
    plan: ParallelPlan | None = None,
    *,
    processor: OmniProcessor | ProcessorMixin | PreTrainedTokenizerBase | None = None,
    optimizer: MakeOptimizer | None = None,
    losses: Mapping[str, TokenFunction] | None = None,
    weights_path: str | Path | None = None,
    **options: Any,
) -> PreparedLoop:
    """Prepare a training loop of your own: join the ranks, parallelize the model, open the data, make the optimizer.

    It runs under ``torchrun``, or in one process without a launcher. All ranks must call it with the same arguments. ::

        run = ot.prepare(model, rows, plan, processor=processor, pack_tokens=4096, global_batch_size=64,
                         optimizer=partial(torch.optim.AdamW, lr=1e-5))
        for batch in run:
            loss = run.forward_backward(batch)
            ot.clip_gradients(run.model.parameters(), 1.0)
            run.optimizer.step()
            run.optimizer.zero_grad()

    The model computes in bf16 on CUDA, unless the plan sets another dtype, and as the plan says on CPU.

    Args:
        model: an :class:`OmniModel`, or a HF model, which becomes its foundation. Changed in place.
        data: a dataset or a path of rows, or the ``data`` of a recipe; see :func:`build_dataloader`.
        plan: degrees, memory, precision, ... of each component. None: FSDP2 over all ranks.
        processor: turns rows of messages into samples: that of the HF model, or an :class:`OmniProcessor`. None: rows
            are samples, or the outputs of a HF processor, unless ``collate_fn`` reads others.
        optimizer: makes the optimizer from groups of parameters. Norms and biases have no weight decay. None: make your
            own from ``run.model.parameters()``.
        losses: head (``text``, or a decoder) -> a loss in place of its cross entropy: from logits ``[n, classes]``
            (fp32) and labels ``[n]`` of some tokens to ``[n]``. ``model`` must be an :class:`OmniModel`.
        weights_path: as of :func:`build_parallelize_model`, for a model without weights.
        options: of :func:`build_dataloader`, such as ``pack_tokens``, ``micro_batch_size``, ``global_batch_size``,
            ``num_workers`` and ``seed``; for the ``data`` of a recipe ``slots``, the packs of a step over all ranks.

    Raises:
        UserError: arguments, plan, ranks, model and data do not fit together.
    """
    if optimizer is not None and (isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer)):
        raise UserError(
            f"optimizer: found a {type(optimizer).__name__}, but the model's parameters are not divided among the "
            "ranks yet; pass a function that makes the optimizer, such as partial(torch.optim.AdamW, lr=1e-5)"
        )
    if not isinstance(plan, ParallelPlan | None):
        raise UserError(f"plan: found a {type(plan).__name__}; expected a ParallelPlan")
    if not isinstance(processor, OmniProcessor | ProcessorMixin | PreTrainedTokenizerBase | None):
        raise UserError(
            f"processor: found a {type(processor).__name__}; expected an OmniProcessor, or the processor of the HF "
            "model, such as AutoProcessor.from_pretrained(source)"
        )
    if losses:
        if not isinstance(model, OmniModel):
            raise UserError(f"losses: found a {type(model).__name__}; pass ot.build_omni_model(foundation=model)")
        install_losses(model, losses, "losses")
    plan = plan or ParallelPlan()
    state = init_state_of(plan)
    mixed = True if state.device_type == "cuda" else None
    omni = build_parallelize_model(model, weights_path, state, plan, enable_mixed_precision=mixed).train()
    native = trainable_media(plan, omni.native_inputs)
    if processor is None:
        options = {"collate_fn": OmniDataCollatorWithPacking(native)} | options
    elif not isinstance(processor, OmniProcessor):
        processor = OmniProcessor(TemplateRenderer(processor, native), *omni.media_adapters())
    elif isinstance(processor.renderer, TemplateRenderer):
        processor = processor.rendering(
            processor.renderer.with_native(trainable_media(plan, processor.renderer.native))
        )
    loader = _loader(omni, data, processor, state, options)
    made = None if optimizer is None else _optimizer(omni, optimizer)
    return PreparedLoop(omni, processor, loader, made, state, step_planner(omni), GlooGroup())


def _loader(
    model: OmniModel, data: Any, processor: OmniProcessor | None, state: ParallelState, options: dict[str, Any]
) -> DatasetLoader | StepLoader:
    """Open this rank's share of the data; a section draws none, but counts the steps of a dataset."""
    contract, is_main = model.runner.contract, state.section == MAIN
    main = state.of_section(MAIN)
    of_ranks: dict[str, Any] = {
        "rank": state.dp_rank if is_main else 0,
        "ranks": main.dp_size,
        "alone": not contract.packs,
    }
    if isinstance(data, str | Path):
        (data,) = open_sources([DataSource(path=str(data))])
    if isinstance(data, Data):
        own = state.dp_rank if is_main else None
        of_ranks |= {"rank": own, "idle": idle_prompt(model), "media_names": model.media_of_data}
    if processor is not None:
        of_ranks["without_tails"] = contract.without_tails
    return build_dataloader(data, processor, **of_ranks, **options)


def _optimizer(model: OmniModel, make: MakeOptimizer) -> torch.optim.Optimizer:
    layout = layout_of(model)
    assert layout is not None, "the model is parallelized"
    offloaded = set(layout.offloaded(model))
    trained, rows_alone = trained_parameters(model), map(model.get_parameter, token_matrices(model))
    decayed = decayed_parameters(model).difference(rows_alone)  # there only the rows of new tokens train
    require_fp32({name: p.dtype for name, p in trained.items() if p not in offloaded})
    with_decay = [p for p in trained.values() if p in decayed]
    without = [p for p in trained.values() if p not in decayed]
    groups = [group for group in ({"params": with_decay}, {"params": without, "weight_decay": 0.0}) if group["params"]]
    return OffloadedOptimizer(make, groups, offloaded) if offloaded else make(groups)

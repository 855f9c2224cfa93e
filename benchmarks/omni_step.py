"""A training step of omnitrain over ready packs, built from the same functions as ``Trainer``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from omnitrain.data.packing.pack import Pack
from omnitrain.models.omni.build import build_omni_model
from omnitrain.optim.build import build_optimizer
from omnitrain.optim.gradients import clip_gradients
from omnitrain.parallel.layout import layout_of
from omnitrain.parallel.parallelize import build_parallelize_model
from omnitrain.parallel.schedule.accumulate import accumulate_gradients
from omnitrain.parallel.step.plan import step_planner
from omnitrain.recipe import Ops, Optimizer, ParallelPlan
from omnitrain.train.build_from_recipe import use_ops
from omnitrain.train.device import compute_dtype
from omnitrain.train.metrics.meter import LossMeter
from omnitrain.train.process_groups import join_ranks

STALL_SECONDS = 600.0


class OmniStep:
    """``Trainer.train_step`` without its recipe: plan, forward and backward, clipping, update, metrics.

    The trainer plans in its data process, a step ahead; here that time counts.

    Attributes:
        model: as it lies on the ranks.
        optimizer: of its weights.
    """

    def __init__(
        self,
        foundation: PreTrainedModel,
        plan: ParallelPlan,
        settings: Optimizer,
        device: torch.device,
        full_shard: bool = True,
        ops: Ops | None = None,
    ) -> None:
        """Lay ``foundation`` out over the ranks as ``plan`` says; every rank calls this.

        Args:
            foundation: of the model, which is all of it.
            plan: of its components.
            settings: of the optimizer.
            device: of this rank.
            full_shard: weights go back to their shards between forward and backward.
            ops: backends of operations; None: those of the device.
        """
        self._settings = settings
        self._ranks = join_ranks(plan, device)
        self.model = build_omni_model(foundation=foundation, init_device=str(device)).train()
        use_ops(self.model, ops or Ops(), device, compute_dtype(plan, None))
        build_parallelize_model(
            self.model,
            parallel_state=self._ranks.state,
            parallel_plan=plan,
            enable_full_shard=full_shard,
            enable_mixed_precision=None,
        )
        layout = layout_of(self.model)
        assert layout is not None
        self.optimizer = build_optimizer(self.model, settings, layout.offloaded(self.model))
        self._planner = step_planner(self.model, self._ranks.rendezvous)
        self._meter = LossMeter()
        self._watch = self._ranks.watch(STALL_SECONDS)
        self._watch.follow(self.model)
        self._watch.__enter__()
        self._step = 0

    def run(self, packs: Sequence[Pack]) -> float:
        """Run one optimizer step over the packs of all ranks, and return the loss of all."""
        part = self.accumulate(packs)
        self._watch.at(phase="optimizer")
        clip_gradients(self.model.parameters(), self._settings.max_grad_norm).item()
        loss = self._ranks.peers.sum(part.item())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def accumulate(self, packs: Sequence[Pack]) -> torch.Tensor:
        """Add up the gradients of a step, and return this rank's part of the loss."""
        self._step += 1
        self._watch.at(step=self._step, phase="data")
        batch = self._planner(packs)
        return accumulate_gradients(self.model, batch, on_output=self._meter.add, on_phase=self._watch.at)

    def close(self) -> None:
        """Let the other ranks continue without this one."""
        self._watch.close()

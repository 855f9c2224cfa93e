"""The sides of the benchmarks on one GPU: steps of omnitrain, and of HF ``Trainer``."""

from __future__ import annotations

import copy
import importlib.util
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import torch
import transformers
from gpu_batches import Batch
from gpu_harness import WARM_UP, Measured, synchronize
from gpu_operations import operations
from harness import HF_QUIET
from omni_step import OmniStep
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback, TrainingArguments
from transformers.integrations.liger import apply_liger_kernel

from omnitrain.data.packing.pack import Pack
from omnitrain.models.hf.load import foundation_class
from omnitrain.models.hf.samples import to_samples
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.state import leave_process_groups
from omnitrain.recipe import Optimizer, ParallelPlan, Precision
from omnitrain.recipe.parallel import FOUNDATION, ComponentPlan

SETTINGS = Optimizer(learning_rate=1e-5, warmup_steps=0, schedule="constant")

Collate = Callable[[list[Batch]], dict[str, Any]]


def fresh(config: Any, device: torch.device) -> PreTrainedModel:
    """Build the model with random weights on the device, which takes a second instead of a minute."""
    torch.manual_seed(0)
    with device:
        return foundation_class(config)(copy.deepcopy(config)).train()


def foundation_plan(given: Namespace) -> ComponentPlan:
    """Of our side, beside what all components share."""
    return ComponentPlan(compile=True) if given.device.type == "cuda" and not given.eager else ComponentPlan()


def run_omnitrain(
    config: Any,
    batches: list[Batch],
    given: Namespace,
    foundation: ComponentPlan,
    alter: Callable[[OmniModel], None] | None = None,
) -> Measured:
    """Run omnitrain's side.

    Args:
        config: of the model.
        batches: one per step.
        given: the command line.
        foundation: how it lies there.
        alter: changes the model before its first step; None: nothing does.
    """
    precision = Precision(compute="bfloat16")
    default = ComponentPlan(mode="fsdp2", precision=precision)
    plan = ParallelPlan(default=default, components={FOUNDATION: foundation})
    model = fresh(config, given.device)
    counted = [operations(config, model, batch) for batch in batches]
    with ExitStack() as stack:
        stack.callback(leave_process_groups)
        # HF keeps its bf16 copies of the weights from forward to backward, too.
        step = OmniStep(model, plan, SETTINGS, given.device, full_shard=False)
        stack.callback(step.close)
        if alter is not None:
            alter(step.model)
        native = step.model.runner.native
        packs = [Pack.from_samples(to_samples(native, batch)) for batch in batches]
        measured = Measured(first_losses=[step.run([pack]) for pack in packs[:WARM_UP]])
        for first in range(WARM_UP, len(packs), given.steps):
            part = slice(first, first + given.steps)
            synchronize(given.device)
            began = time.perf_counter()
            for pack in packs[part]:
                step.run([pack])
            synchronize(given.device)
            measured.add(sum(p.num_tokens for p in packs[part]), sum(counted[part]), time.perf_counter() - began)
            if measured.seconds > given.seconds:
                break
    return measured


class RoundTimes(TrainerCallback):
    """Records the time at the end of each round."""

    def __init__(self, given: Namespace) -> None:
        self._given = given
        self.times: list[float] = []

    def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
        """The warm-up, or a round, may be over; the last one, if it is late."""
        if state.global_step >= WARM_UP and (state.global_step - WARM_UP) % self._given.steps == 0:
            synchronize(self._given.device)
            self.times.append(time.perf_counter())
            control.should_training_stop |= self.times[-1] - self.times[0] > self._given.seconds


def run_hf(
    collate: Collate, config: Any, batches: list[Batch], given: Namespace, kernels: dict[str, bool] | None = None
) -> Measured:
    """HF ``Trainer``, whose batches ``collate`` makes; ``kernels``: liger's switches, where not as liger has them."""
    model = fresh(config, given.device)
    measured = Measured(uses_liger=can_use("liger_kernel", given.device) and _took_liger(model, kernels))
    model.set_attn_implementation("flash_attention_2" if can_use("flash_attn", given.device) else "sdpa")
    losses: list[torch.Tensor] = []

    def keep_first_loss(_: Any, __: Any, output: Any) -> None:
        losses.append(output.loss.detach())
        hook.remove()

    hook = model.register_forward_hook(keep_first_loss)
    counted = [operations(config, model, batch) for batch in batches]
    rounds, number = RoundTimes(given), WARM_UP + given.rounds * given.steps
    order = [index % len(batches) for index in range(number)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = transformers.Trainer(
            model,
            _arguments(folder, number, given.device),
            collate,
            [batches[index] for index in order],
            callbacks=[rounds],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    measured.first_losses.append(losses[0].item())
    for begin, (began, ended) in zip(range(WARM_UP, number, given.steps), pairwise(rounds.times), strict=False):
        part = order[begin : begin + given.steps]
        tokens = sum(len(sample["input_ids"]) for index in part for sample in batches[index])
        measured.add(tokens, sum(counted[index] for index in part), ended - began)
    return measured


def can_use(package: str, device: torch.device) -> bool:
    """Whether HF can use kernels of ``package``."""
    return device.type == "cuda" and importlib.util.find_spec(package) is not None


def _took_liger(model: PreTrainedModel, kernels: dict[str, bool] | None) -> bool:
    """As HF ``Trainer`` puts liger's kernels in; a liger that knows another transformers leaves the model as it was."""
    try:
        apply_liger_kernel(model, kernels)
    except ImportError as error:
        print(f"{type(model).__name__} without liger: {error}", flush=True)
        return False
    return True


def _arguments(folder: str, steps: int, device: torch.device) -> TrainingArguments:
    return TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=1,  # an item of the data set is a batch already
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        bf16=True,
        optim="adamw_torch_fused",
        learning_rate=SETTINGS.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=SETTINGS.weight_decay,
        adam_beta1=SETTINGS.betas[0],
        adam_beta2=SETTINGS.betas[1],
        max_grad_norm=SETTINGS.max_grad_norm,
        **HF_QUIET,
        use_cpu=device.type == "cpu",
        dataloader_num_workers=2 if device.type == "cuda" else 0,
        seed=0,
    )

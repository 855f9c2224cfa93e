"""The sides of the phases: steps of omnitrain, and of HF ``Trainer``."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Literal

import torch
import transformers
from harness import HF_QUIET
from omni_step import OmniStep
from torch import Tensor
from torch.nn.attention import varlen
from transformers import AttentionInterface, PreTrainedModel, PrinterCallback, TrainerCallback, TrainingArguments
from transformers.integrations.liger import apply_liger_kernel

from gpu.batches import Batch, flattened
from gpu.measured import WARM_UP, Load, Measured, synchronize
from gpu.operations import operations
from omnitrain.data.packing.pack import Pack
from omnitrain.models.hf.load import foundation_class
from omnitrain.models.hf.samples import to_samples
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.attention.spec import repeat_heads
from omnitrain.parallel.state import leave_process_groups
from omnitrain.recipe import Ops, Optimizer, ParallelPlan, Precision
from omnitrain.recipe.parallel import FOUNDATION, ComponentPlan

SETTINGS = Optimizer(learning_rate=1e-5, warmup_steps=0, schedule="constant")

Alter = Callable[[OmniModel], None]
VARLEN = "varlen_of_torch"  # in the registry of transformers


def fresh(config: Any, device: torch.device) -> PreTrainedModel:
    """Build the model with random weights on the device, which takes a second instead of a minute."""
    torch.manual_seed(0)
    with device:
        return foundation_class(config)(copy.deepcopy(config)).train()


@contextmanager
def laid_out(
    config: Any,
    device: torch.device,
    foundation: ComponentPlan,
    ops: Ops,
    compute: Literal["float32", "bfloat16"] = "bfloat16",
    alter: Alter | None = None,
) -> Iterator[OmniStep]:
    """Build a random model for steps on one rank, and leave the process group at the end.

    Args:
        config: of the model.
        device: of the rank.
        foundation: fields of its plan other than mode and precision.
        ops: backends of operations.
        compute: dtype of the computation; weights are fp32.
        alter: changes the model before its first step; None: nothing does.
    """
    default = ComponentPlan(mode="fsdp2", precision=Precision(compute=compute))
    plan = ParallelPlan(default=default, components={FOUNDATION: foundation})
    try:
        # HF keeps its bf16 copies of the weights from forward to backward, too.
        step = OmniStep(fresh(config, device), plan, SETTINGS, device, full_shard=False, ops=ops)
        try:
            if alter is not None:
                alter(step.model)
            yield step
        finally:
            step.close()
    finally:
        leave_process_groups()


def packs_of(step: OmniStep, batches: list[Batch]) -> list[Pack]:
    """Return the batches as packs of the step's model."""
    return [Pack.from_samples(to_samples(step.model.runner.native, batch)) for batch in batches]


def run_omnitrain(
    config: Any,
    batches: list[Batch],
    load: Load,
    foundation: ComponentPlan,
    ops: Ops,
    alter: Alter | None = None,
) -> Measured:
    """Run omnitrain's side; see :func:`laid_out`."""
    with laid_out(config, load.device, foundation, ops, alter=alter) as step:
        counted = [operations(config, step.model.foundation, batch) for batch in batches]
        packs = packs_of(step, batches)
        losses = [step.run([pack]) for pack in packs[:WARM_UP]]
        measured = Measured(first_loss=losses[0])
        for first in range(WARM_UP, len(packs), load.steps):
            part = slice(first, first + load.steps)
            synchronize(load.device)
            began = time.perf_counter()
            for pack in packs[part]:
                step.run([pack])
            synchronize(load.device)
            measured.add(sum(p.num_tokens for p in packs[part]), sum(counted[part]), time.perf_counter() - began)
            if measured.seconds > load.seconds:
                break
    return measured


class RoundTimes(TrainerCallback):
    """Records the time at the end of each round."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self.times: list[float] = []

    def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
        """The warm-up, or a round, may be over; the last one, if it is late."""
        if state.global_step >= WARM_UP and (state.global_step - WARM_UP) % self._load.steps == 0:
            synchronize(self._load.device)
            self.times.append(time.perf_counter())
            control.should_training_stop |= self.times[-1] - self.times[0] > self._load.seconds


def varlen_of_torch(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend within samples, as an attention function of transformers: the same kernel as omnitrain's ``varlen``."""
    grouped = {"enable_gqa": True}
    if "enable_gqa" not in inspect.signature(varlen.varlen_attn).parameters:  # torch 2.11
        key, value, grouped = repeat_heads(key, query.size(1)), repeat_heads(value, query.size(1)), {}
    rows = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    lengths = cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q
    out = varlen.varlen_attn(*rows, *lengths, scale=scaling, window_size=(-1, 0), **grouped)
    return out[None], None


def run_hf(config: Any, batches: list[Batch], load: Load, kernels: dict[str, bool] | None = None) -> Measured:
    """HF ``Trainer`` on the same packs; ``kernels``: liger's switches, where not as liger has them."""
    model = fresh(config, load.device)
    measured = Measured(uses_liger=can_use("liger_kernel", load.device) and _took_liger(model, kernels))
    AttentionInterface.register(VARLEN, varlen_of_torch)
    model.set_attn_implementation(VARLEN if load.device.type == "cuda" else "sdpa")
    losses: list[Tensor] = []

    def keep_first_loss(_: Any, __: Any, output: Any) -> None:
        losses.append(output.loss.detach())
        hook.remove()

    hook = model.register_forward_hook(keep_first_loss)
    counted = [operations(config, model, batch) for batch in batches]
    rounds = RoundTimes(load)
    with tempfile.TemporaryDirectory() as folder:
        arguments = _arguments(folder, len(batches), load.device)
        trainer = transformers.Trainer(model, arguments, flattened, batches, callbacks=[rounds])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    measured.first_loss = losses[0].item()
    for begin, (began, ended) in zip(range(WARM_UP, len(batches), load.steps), pairwise(rounds.times), strict=False):
        part = slice(begin, begin + load.steps)
        tokens = sum(len(sample["input_ids"]) for batch in batches[part] for sample in batch)
        measured.add(tokens, sum(counted[part]), ended - began)
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

"""Training speed on one GPU: omnitrain against HF ``Trainer`` on the same samples.

Two random models with the widths of Qwen3-4B and Qwen3-VL-4B. State is fp32 (weights, gradients, Adam), computation
bf16, nothing is recomputed. The depth of the language model is ``--layers``, by default as many layers as fit in the
free memory on the hungriest side (HF without liger, which keeps all logits); all sides have the same. Samples are text
and pictures of this repository (``repo_samples.py``), prepared before anything is timed:

- ``text``: documentation and source code, every token predicted;
- ``mixed``: the same, every other sample behind a mosaic of handwritten digits.

Sides, one after the other, because two models do not fit at once:

- ``omnitrain``: packs of ``--tokens`` tokens, the step of ``Trainer``, blocks compiled on a GPU;
- ``hf_flattened`` (text): HF ``Trainer`` with ``DataCollatorWithFlattening``, on just these packs;
- ``hf_padded``: HF ``Trainer``, samples sorted by length, padded to at most ``--tokens`` tokens with padding.

HF runs in bf16 by autocast, with liger's kernels and flash attention where these packages are installed (and liger's
fit transformers'), sdpa where not. It neither logs nor saves. A round is ``--steps`` optimizer steps; the device is
synchronised at its ends only. A side has as many rounds as ``--seconds`` allow, at least one and at most ``--rounds``.
Our sides come first: liger changes transformers' modules for the whole process.

Floating point operations of a step, counted for real tokens alone, and never for recomputation:
``6 x block parameters x tokens + 6 x vocabulary x hidden x predicted tokens + 6 x layers x heads x head_dim x
sum(length^2)`` (causal: half of all pairs) for the language model; ``6 x tower parameters x patches + 6 x merger
parameters x image tokens + 12 x depth x hidden x sum(patches of an image^2)`` for the tower. Parameters are those of
matrices, of experts those that a token goes to. Rows of the last layer that no head reads count, too, although
omnitrain leaves them out. The ceiling is what a square bf16 matrix product reaches in the same run.
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import os
import random
import sys
import tempfile
import time
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, pairwise
from statistics import median
from typing import Any, TypeVar

import torch
import transformers
from harness import Result, parser, report, start
from omni_step import OmniStep
from repo_samples import mixed_samples, text_samples
from transformers import (
    AutoConfig,
    DataCollatorWithFlattening,
    PreTrainedModel,
    PrinterCallback,
    TrainerCallback,
    TrainingArguments,
)
from transformers.integrations.liger import apply_liger_kernel

from omnitrain.data.pack import IGNORED, Pack
from omnitrain.data.packing import fill_pack
from omnitrain.models.hf import foundation_class
from omnitrain.models.hf_samples import to_samples
from omnitrain.models.omni import OmniModel
from omnitrain.recipe import Optimizer, ParallelPlan, Precision
from omnitrain.recipe.parallel import FOUNDATION, ComponentPlan
from omnitrain.train.metrics import peak_memory_mb
from omnitrain.train.ranks import leave_ranks

FORMULA = (
    "share_of_ceiling = operations of a round / seconds / ceiling (operations as in this file's head); "
    "ratio_over_hf = omnitrain / best HF side, in tokens without padding per second; medians over rounds"
)
WARM_UP = 3  # steps of a side before its clock starts: compilation, allocation
SETTINGS = Optimizer(learning_rate=1e-5, warmup_steps=0, schedule="constant")
HF_SIDES = {"text": ("hf_flattened", "hf_padded"), "mixed": ("hf_padded",)}
HELD = 64  # samples from which packs are filled

# Bytes of a parameter: weight, gradient and two moments in fp32, and a bf16 copy while it is used.
_PARAMETER_BYTES = 4 * 4 + 2
# What HF keeps of a token for the backward under autocast, in bytes per unit of width. A layer: of two norms input,
# normalised rows and result in fp32 and bf16; of the heads before and after norm and rotation; for sdpa with a mask,
# keys and values once per head and the mask's row, in bf16; of the MLP gate, up, silu and product. A block of the
# tower: the same in bf16. Of logits: one in bf16, three in fp32.
_HIDDEN_BYTES, _HEAD_BYTES, _SDPA_BYTES, _MLP_BYTES, _LOGIT_BYTES = 32, 12, 2, 10, 14
_TOWER_HIDDEN_BYTES, _TOWER_MLP_BYTES = 28, 4
# Of a token's row for each of its experts, all in fp32, since autocast leaves grouped products alone: the row, its
# result before and after the weight and in order of the tokens; gate and up, silu and product.
_ROW_HIDDEN_BYTES, _ROW_INNER_BYTES = 16, 16
_PATCHES = 2  # per token of a pack: half of the tokens are of images, with four patches each
_USED = 0.9  # of the free memory; the rest is for fragmentation


@dataclass(frozen=True)
class Sizes:
    """Of the models and samples.

    Attributes:
        text: config of the language model.
        vision: of the tower.
        special: ids of image, video, start and end of an image.
        mrope: sections of the rotary positions.
        longest: tokens of a sample's text.
        sides: least and largest side of an image, in units of 32 pixels.
        matmul: side of the ceiling's matrices.
    """

    text: dict[str, Any]
    vision: dict[str, Any]
    special: tuple[int, int, int, int]
    mrope: list[int]
    longest: int
    sides: tuple[int, int]
    matmul: int


FULL = Sizes(
    text={
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
    },
    vision={
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [5, 11, 17],
    },
    special=(151655, 151656, 151652, 151653),
    mrope=[24, 20, 20],
    longest=4096,
    sides=(8, 28),
    matmul=8192,
)
TINY = Sizes(
    text=FULL.text
    | {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512},
    vision=FULL.vision
    | {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
    | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
    special=(500, 501, 502, 503),
    mrope=[4, 2, 2],
    longest=64,
    sides=(1, 3),
    matmul=128,
)


def config_of(kind: str, sizes: Sizes, layers: int) -> Any:
    """HF's config: Qwen3 for ``text``, Qwen3-VL for ``mixed``."""
    text = sizes.text | {"num_hidden_layers": layers}
    if kind == "text":
        return AutoConfig.for_model("qwen3", **text, tie_word_embeddings=True)
    image, video, opening, closing = sizes.special
    rope = {"rope_type": "default", "mrope_section": sizes.mrope, "mrope_interleaved": True, "rope_theta": 5e6}
    vision = {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3}
    return AutoConfig.for_model(
        "qwen3_vl",
        tie_word_embeddings=True,
        text_config=text | {"rope_parameters": rope},
        vision_config=sizes.vision | vision | {"out_hidden_size": text["hidden_size"]},
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=opening,
        vision_end_token_id=closing,
    )


def fresh(config: Any, device: torch.device) -> PreTrainedModel:
    """The model with random weights, made on the device: there it takes a second, not a minute."""
    torch.manual_seed(0)
    with device:
        return foundation_class(config)(copy.deepcopy(config)).train()


def layers_that_fit(kind: str, sizes: Sizes, given: Namespace, vocabulary_matrices: int = 1) -> int:
    """Layers of the language model for which the free memory is enough; with a head of its own there are 2 matrices."""
    text, vision, tokens = sizes.text, sizes.vision, given.tokens
    if given.device.type != "cuda":
        return text["num_hidden_layers"]
    layer = _layer_bytes(text, tokens)
    in_vocabulary = vocabulary_matrices * text["hidden_size"] * _PARAMETER_BYTES
    taken = text["vocab_size"] * (in_vocabulary + tokens * _LOGIT_BYTES)
    if kind == "mixed":
        hidden, inner = vision["hidden_size"], vision["intermediate_size"]
        block = hidden * (4 * hidden + 2 * inner) * _PARAMETER_BYTES
        block += _PATCHES * tokens * (hidden * _TOWER_HIDDEN_BYTES + inner * _TOWER_MLP_BYTES)
        taken += vision["depth"] * block
    free, _ = torch.cuda.mem_get_info(given.device)
    return max(1, min(text["num_hidden_layers"], int((free * _USED - taken) / layer)))


def _layer_bytes(text: dict[str, Any], tokens: int) -> int:
    """Of the language model."""
    hidden, inner = text["hidden_size"], text["intermediate_size"]
    queries, keys = (text[f"num_{which}_heads"] * text["head_dim"] for which in ("attention", "key_value"))
    per_token = hidden * _HIDDEN_BYTES + (queries + 2 * keys) * _HEAD_BYTES + (2 * queries + tokens) * _SDPA_BYTES
    if "num_experts" in text:
        of_one = text["moe_intermediate_size"]
        per_token += text["num_experts_per_tok"] * (hidden * _ROW_HIDDEN_BYTES + of_one * _ROW_INNER_BYTES)
        inner = text["num_experts"] * of_one
    else:
        per_token += inner * _MLP_BYTES
    return hidden * (2 * queries + 2 * keys + 3 * inner) * _PARAMETER_BYTES + tokens * per_token


def synchronize(device: torch.device) -> None:
    """All that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ceiling(side: int, device: torch.device) -> float:
    """Operations per second of a square bf16 matrix product, the best of a hundred: a GPU's clock rises slowly."""
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = []
    for _ in range(100):
        synchronize(device)
        began = time.perf_counter()
        torch.mm(a, b)
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    return 2 * side**3 / min(seconds)


def operations(config: Any, model: PreTrainedModel, samples: Sequence[dict[str, Any]]) -> float:
    """Of forward and backward of these samples; see the head of this file."""
    text = getattr(config, "text_config", config)
    matrices = {name: p.numel() for name, p in model.named_parameters() if p.ndim >= 2}
    blocks = sum(n for name, n in matrices.items() if ".layers." in name and ".experts." not in name)
    experts = sum(n for name, n in matrices.items() if ".experts." in name)
    if experts:
        blocks += experts * text.num_experts_per_tok // text.num_experts
    tower = sum(n for name, n in matrices.items() if ".visual.blocks." in name or ".visual.patch_embed." in name)
    mergers = sum(n for name, n in matrices.items() if ".visual." in name and "merger" in name)
    attended = text.num_hidden_layers * text.num_attention_heads * text.head_dim
    total = 0.0
    for sample in samples:
        length, predicted = len(sample["input_ids"]), int((sample["labels"][1:] != IGNORED).sum())
        total += 6 * blocks * length + 6 * text.vocab_size * text.hidden_size * predicted + 6 * attended * length**2
        for patches in sample.get("image_grid_thw", torch.zeros(0, 3)).prod(-1).tolist():
            vision = config.vision_config
            total += 6 * tower * patches + 6 * mergers * patches / vision.spatial_merge_size**2
            total += 12 * vision.depth * vision.hidden_size * patches**2
    return total


@dataclass
class Measured:
    """One side.

    Attributes:
        tokens_per_second: without padding, per round.
        operations_per_second: per round.
        first_losses: of the first batches, at least of one.
        seconds: of all rounds.
        peak_mib: of memory.
        uses_liger: HF ran liger's kernels.
    """

    tokens_per_second: list[float] = field(default_factory=list)
    operations_per_second: list[float] = field(default_factory=list)
    first_losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    peak_mib: float = 0.0
    uses_liger: bool = False

    def add(self, tokens: int, performed: float, seconds: float) -> None:
        """A round."""
        self.seconds += seconds
        self.tokens_per_second.append(tokens / seconds)
        self.operations_per_second.append(performed / seconds)


Name = TypeVar("Name", str, tuple[str, str])
Run = Callable[[], Measured]
Batch = list[dict[str, Any]]
Collate = Callable[[list[Batch]], dict[str, Any]]


def packed_batches(samples: Batch, tokens: int, number: int) -> list[Batch]:
    """``number`` batches as omnitrain's packer fills packs, from ``HELD`` samples at a time."""
    waiting, held = iter(samples), list[_Ordered]()
    batches: list[Batch] = []
    while len(batches) < number:
        held += [_Ordered(sample, index) for index, sample in islice(enumerate(waiting), HELD - len(held))]
        chosen = fill_pack(held, tokens)
        held = [sample for sample in held if sample not in chosen]
        batches.append([sample.arguments for sample in chosen])
    return batches


@dataclass(frozen=True, eq=False)
class _Ordered:
    """A sample as the packer takes it."""

    arguments: dict[str, Any]
    index: int

    def __len__(self) -> int:
        return len(self.arguments["input_ids"])


def padded_batches(batches: list[Batch], tokens: int) -> list[Batch]:
    """The same samples, sorted by length, as many at a time as have at most ``tokens`` tokens once padded."""
    cut: list[Batch] = [[]]
    for sample in sorted((s for batch in batches for s in batch), key=lambda s: len(s["input_ids"])):
        if cut[-1] and len(sample["input_ids"]) * (len(cut[-1]) + 1) > tokens:
            cut.append([])
        cut[-1].append(sample)
    random.Random(0).shuffle(cut)
    return cut


def flattened(batches: list[Batch]) -> dict[str, Any]:
    """One batch, by HF's collator."""
    (batch,) = batches
    return DataCollatorWithFlattening()([{n: s[n].tolist() for n in ("input_ids", "labels")} for s in batch])


def padded(batches: list[Batch]) -> dict[str, torch.Tensor]:
    """One batch, padded to its longest sample; media end to end, as HF's processors return them."""
    (batch,) = batches
    ids, labels = ([torch.from_numpy(sample[name]) for sample in batch] for name in ("input_ids", "labels"))
    pad = torch.nn.utils.rnn.pad_sequence
    made = {
        "input_ids": pad(ids, batch_first=True),
        "labels": pad(labels, batch_first=True, padding_value=IGNORED),
        "attention_mask": pad([torch.ones_like(row) for row in ids], batch_first=True),
    }
    media = [sample for sample in batch if "pixel_values" in sample]
    for name in ("pixel_values", "image_grid_thw") if media else ():
        made[name] = torch.cat([torch.from_numpy(sample[name]) for sample in media])
    if "mm_token_type_ids" in batch[0]:
        types = [torch.from_numpy(sample["mm_token_type_ids"]) for sample in batch]
        made["mm_token_type_ids"] = pad(types, batch_first=True)
    return made


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
    """Ours.

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
        stack.callback(leave_ranks)
        step = OmniStep(model, plan, SETTINGS, given.device)
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


class Borders(TrainerCallback):
    """Takes the time at the ends of rounds."""

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
    borders, number = Borders(given), WARM_UP + given.rounds * given.steps
    order = [index % len(batches) for index in range(number)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = transformers.Trainer(
            model,
            _arguments(folder, number, given.device),
            collate,
            [batches[index] for index in order],
            callbacks=[borders],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    measured.first_losses.append(losses[0].item())
    for begin, (began, ended) in zip(range(WARM_UP, number, given.steps), pairwise(borders.times), strict=False):
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
        average_tokens_across_devices=False,
        logging_nan_inf_filter=False,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=device.type == "cpu",
        dataloader_num_workers=2 if device.type == "cuda" else 0,
        seed=0,
    )


def samples_of(kind: str, sizes: Sizes, config: Any, number: int) -> Batch:
    """HF-style samples, with what a HF processor adds for this model."""
    if kind == "text":
        return text_samples(number, sizes.longest)
    made = mixed_samples(number, sizes.longest, sizes.sides, config)
    return [
        sample | {"mm_token_type_ids": (sample["input_ids"] == config.image_token_id).astype(int)} for sample in made
    ]


def batches_of(kind: str, sizes: Sizes, config: Any, given: Namespace) -> list[Batch]:
    """The packs of all steps."""
    number = WARM_UP + given.rounds * given.steps
    samples: Batch = []
    while sum(len(sample["input_ids"]) for sample in samples[:-HELD]) < number * given.tokens:
        samples = samples_of(kind, sizes, config, 2 * len(samples) or 2 * HELD)
    return packed_batches(samples, given.tokens, number)


def measure(given: Namespace) -> Result:
    """Both kinds of data, all sides."""
    sizes = TINY if given.tiny else FULL
    limit = ceiling(sizes.matmul, given.device)
    layers = {kind: given.layers or layers_that_fit(kind, sizes, given) for kind in HF_SIDES}
    configs = {kind: config_of(kind, sizes, number) for kind, number in layers.items()}
    packs = {kind: batches_of(kind, sizes, config, given) for kind, config in configs.items()}
    sides: dict[tuple[str, str], Run] = {
        (kind, "omnitrain"): partial(run_omnitrain, config, packs[kind], given, foundation_plan(given))
        for kind, config in configs.items()
    }
    for kind, side in ((kind, side) for kind, sides_of_hf in HF_SIDES.items() for side in sides_of_hf):
        collate, batches = flattened, packs[kind]
        if side == "hf_padded":
            collate, batches = padded, padded_batches(packs[kind], given.tokens)
        sides[kind, side] = partial(run_hf, collate, configs[kind], batches, given)
    found = dict(measured_one_by_one(given.device, sides))
    if {("text", "omnitrain"), ("text", "hf_flattened")} <= found.keys():
        check_losses(found["text", "omnitrain"], found["text", "hf_flattened"])
    figures = {f"{kind}_layers": float(number) for kind, number in layers.items()}
    figures |= {"hf_uses_flash_attn": float(can_use("flash_attn", given.device))}
    figures |= {"tokens_per_pack": float(given.tokens), "failed_sides": float(len(sides) - len(found))}
    return _result(found, limit, figures)


def measured_one_by_one(device: torch.device, sides: dict[Name, Run]) -> Iterator[tuple[Name, Measured]]:
    """Each side has the memory for itself: two models do not fit at once.

    One that fails is left out, and why is printed: what the others took minutes for is not lost.
    """
    for side, run in sides.items():
        for _ in range(3):  # what is found may hold more from outside Python: a model goes with the second
            gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        name, began = side if isinstance(side, str) else " ".join(side), time.perf_counter()
        try:
            measured = run()
        except Exception:  # whatever transformers, liger, a compiler or the memory lacks
            traceback.print_exc()
            print(f"{name} failed", flush=True)
            continue
        measured.peak_mib = peak_memory_mb(device)
        tokens, seconds = median(measured.tokens_per_second), time.perf_counter() - began
        print(f"{name}: {tokens:,.0f} tokens/s, {measured.peak_mib:,.0f} MiB; took {seconds:.0f} s", flush=True)
        yield side, measured


def check_losses(ours: Measured, theirs: Measured) -> None:
    """The same weights and samples: on the same pack the losses are the same up to the rounding of bf16."""
    torch.testing.assert_close(ours.first_losses[0], theirs.first_losses[0], rtol=1e-2, atol=0)


def _result(found: dict[tuple[str, str], Measured], limit: float, more: dict[str, float]) -> Result:
    figures = {}
    for kind in HF_SIDES:
        sides = {side: measured for (of, side), measured in found.items() if of == kind}
        if (ours := sides.pop("omnitrain", None)) is None:
            continue
        figures[f"{kind}_share_of_ceiling"] = median(ours.operations_per_second) / limit
        if sides:
            best = max(median(measured.tokens_per_second) for measured in sides.values())
            figures[f"{kind}_ratio_over_hf"] = median(ours.tokens_per_second) / best
    for (kind, side), measured in found.items():
        figures[f"{kind}_{side}_tokens_per_second"] = median(measured.tokens_per_second)
        figures[f"{kind}_{side}_tflop_per_second"] = median(measured.operations_per_second) / 1e12
        figures[f"{kind}_{side}_peak_mib"] = measured.peak_mib
        if side != "omnitrain":
            figures[f"{kind}_{side}_uses_liger"] = float(measured.uses_liger)
    figures |= {"ceiling_tflop_per_second": limit / 1e12, **more}
    rounds = {f"{kind}_{side}_tokens_per_second": m.tokens_per_second for (kind, side), m in found.items()}
    return Result("gpu_train", FORMULA, figures, rounds)


def start_on_device(options: ArgumentParser, tokens: int) -> Namespace:
    """Read the command line; adds the device, and the tokens of a pack where they are not given."""
    options.add_argument("--tokens", type=int, help=f"of a pack; {tokens}, and 256 with --tiny")
    options.add_argument("--layers", type=int, help="of the language model; unset: as many as fit")
    options.add_argument("--tiny", action="store_true", help="toy sizes, which a CPU can do")
    options.add_argument("--seconds", type=float, default=25.0, help="of the rounds of a side, if there are many")
    options.add_argument("--eager", action="store_true", help="our blocks are not compiled")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # with more of them HF Trainer would use all
    given = start(options)
    given.tokens = given.tokens or (256 if given.tiny else tokens)
    given.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return given


def report_all(result: Result, given: Namespace) -> None:
    """What was measured, and then an error where something was not."""
    report(result, given.json)
    if failed := result.figures["failed_sides"]:
        sys.exit(f"{result.name}: {failed:.0f} sides failed; see above")


def main() -> None:
    """Measure and report."""
    given = start_on_device(parser(sys.modules[__name__].__doc__ or "", rounds=7, steps=2), FULL.longest * 2)
    report_all(measure(given), given)


if __name__ == "__main__":
    main()

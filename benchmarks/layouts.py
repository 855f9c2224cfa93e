"""A step on two ranks of this machine: omnitrain against FSDP2 applied by hand to the same HF model.

Two random models, from the same seed on all sides, in fp32, on gloo ranks with one thread each: ``text`` is a Qwen3,
``vlm`` a Qwen3-VL whose every rank draws images in every step. All sides train on the same packs (``--tokens``
tokens on each rank) with the same fused AdamW and the same clipping, and the losses must agree.

- ``omnitrain``: what ``Trainer`` does in a step: ``build_parallelize_model``, the step plan (in the trainer a data
  process makes it), its fused ops and attention, metrics, the stall watch;
- ``by_hand``: ``fully_shard`` per block and on the model, HF's own forward, attention (sdpa; samples kept apart by
  position ids) and loss, divided by the all-reduced count of predicted tokens, ``clip_grad_norm_``;
- ``same_forward`` (text): ``fully_shard`` by hand around omnitrain's forward and loss, which tells what the layout
  costs from what the forward gains.

Sides take turns within the same ranks. Seconds are from barrier to barrier; ``cpu_ratio`` is the ratio of rank 0's
processor seconds, which on a busy machine tells work from waiting for a core. Peak memory is the largest sum of live
tensor bytes of rank 0 within a step (parameters, gradients, optimizer state, activations, buffers of FSDP), as
torch's profiler sees the allocator, in a run of each side alone that is not timed.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from itertools import accumulate
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from harness import Result, in_turn, parser, report, start
from omni_step import OmniStep
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoConfig, PreTrainedModel

from omnitrain.data.packing.pack import IGNORED, Pack
from omnitrain.models.discovery import Discovery, discover
from omnitrain.models.hf.load import foundation_class
from omnitrain.models.hf.samples import to_samples
from omnitrain.models.omni.build import build_omni_model
from omnitrain.optim.build import build_optimizer
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.recipe import Ops, Optimizer, ParallelPlan
from omnitrain.recipe.parallel import ComponentPlan
from omnitrain.train.build_from_recipe import use_ops

FORMULA = (
    "time_ratio = median over rounds of (omnitrain / by_hand seconds per step), "
    "memory_ratio = omnitrain / by_hand peak bytes of live tensors in a step"
)
RANKS = 2
TIMEOUT_SECONDS = 1800.0
SETTINGS = Optimizer(learning_rate=1e-4, warmup_steps=0, schedule="constant")
TEXT_ONLY = {"same_forward"}  # a tower that is called before the root would need omnitrain's own root

PATCH, MERGE, CHANNELS, FRAMES = 16, 2, 3, 2
IMAGE_TOKEN, VIDEO_TOKEN, IMAGE_START, IMAGE_END = 4090, 4091, 4092, 4093
_TEXT = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}


def text_config() -> Any:
    """A Qwen3 of 4.2 million parameters."""
    return AutoConfig.for_model("qwen3", **_TEXT, tie_word_embeddings=True)


def vlm_config() -> Any:
    """The same with a tower, as Qwen3-VL: 5.7 million parameters."""
    return AutoConfig.for_model(
        "qwen3_vl",
        tie_word_embeddings=True,
        text_config=_TEXT
        | {"rope_parameters": {"rope_type": "default", "mrope_section": [8, 4, 4], "rope_theta": 5e6}},
        vision_config={
            "depth": 4,
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_heads": 4,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": FRAMES,
            "in_channels": CHANNELS,
            "out_hidden_size": _TEXT["hidden_size"],
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [1, 2],
        },
        image_token_id=IMAGE_TOKEN,
        video_token_id=VIDEO_TOKEN,
        vision_start_token_id=IMAGE_START,
        vision_end_token_id=IMAGE_END,
    )


CONFIGS = {"text": text_config, "vlm": vlm_config}


def fresh(kind: str) -> PreTrainedModel:
    """Build the model with the initial weights of all sides."""
    torch.manual_seed(0)
    config = CONFIGS[kind]()
    return foundation_class(config)(config).train()


def samples(kind: str, rank: int, tokens: int) -> list[dict[str, np.ndarray]]:
    """HF-style samples of one rank, ``tokens`` together; for ``vlm`` every other one begins with an image."""
    generator, made, free = np.random.default_rng(rank), [], tokens
    while free:
        sample = _image_sample(generator) if kind == "vlm" and len(made) % 2 == 0 else {}
        length = min(free, max(int(generator.lognormal(4.5, 0.8)), 8 + len(sample.get("input_ids", ()))))
        if len(sample.get("input_ids", ())) > length:
            sample = {}
        sample["input_ids"] = np.concatenate(
            [ids := sample.get("input_ids", np.zeros(0, np.int64)), generator.integers(1, 4000, length - len(ids))]
        )
        made.append(sample | {"labels": np.where(np.arange(length) < len(ids), IGNORED, sample["input_ids"])})
        free -= length
    return made


def _image_sample(generator: np.random.Generator) -> dict[str, np.ndarray]:
    height, width = (2 * generator.integers(2, 6, 2)).tolist()
    rows = height * width // MERGE**2
    return {
        "input_ids": np.array([IMAGE_START, *[IMAGE_TOKEN] * rows, IMAGE_END]),
        "pixel_values": generator.normal(size=(height * width, CHANNELS * FRAMES * PATCH**2)).astype(np.float32),
        "image_grid_thw": np.array([[1, height, width]]),
    }


def pack_of(kind: str, native: Discovery, tokens: int) -> Pack:
    """The packed sequence of this rank, the same on all sides."""
    return Pack.from_samples(to_samples(native, samples(kind, dist.get_rank(), tokens)))


class Omnitrain:
    """The step of omnitrain's ``Trainer``."""

    def __init__(self, kind: str, tokens: int) -> None:
        plan = ParallelPlan(default=ComponentPlan(mode="fsdp2"))
        self._step = OmniStep(fresh(kind), plan, SETTINGS, torch.device("cpu"))
        self._packs = [pack_of(kind, self._step.model.runner.native, tokens)]

    def run(self) -> float:
        """Run one step and return the loss of all ranks."""
        return self._step.run(self._packs)

    def close(self) -> None:
        """End the watch."""
        self._step.close()


class ByHand:
    """A training script on plain HF and FSDP2."""

    def __init__(self, kind: str, tokens: int) -> None:
        model = fresh(kind)
        self._batch = _hf_batch(pack_of(kind, discover(model), tokens))
        model.set_attn_implementation("sdpa")
        for module in list(model.modules()):
            if type(module).__name__ in (model._no_split_modules or ()):
                fully_shard(module)
        self._model = fully_shard(model)
        self._optimizer = build_optimizer(self._model, SETTINGS)

    def run(self) -> float:
        """Run one step and return this rank's share of the loss."""
        count = (self._batch["labels"] != IGNORED).sum()
        dist.all_reduce(count)
        loss = self._model(**self._batch, use_cache=False, num_items_in_batch=count).loss
        (loss * dist.get_world_size()).backward()  # FSDP averages
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), SETTINGS.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()

    def close(self) -> None:
        """Do nothing."""


class SameForward:
    """FSDP2 by hand around omnitrain's forward."""

    def __init__(self, kind: str, tokens: int) -> None:
        self._model = build_omni_model(foundation=fresh(kind)).train()
        use_ops(self._model, Ops(), torch.device("cpu"), torch.float32)
        self._pack = pack_of(kind, self._model.runner.native, tokens)
        for block in self._model.foundation.model.layers:
            fully_shard(block)
        fully_shard(self._model)
        self._optimizer = build_optimizer(self._model, SETTINGS)

    def run(self) -> float:
        """Run one step and return this rank's share of the loss."""
        term = self._model(self._pack).losses["text"]
        count = torch.tensor(term.count)
        dist.all_reduce(count)
        loss = term.sum / count
        (loss * dist.get_world_size()).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), SETTINGS.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()

    def close(self) -> None:
        """Do nothing."""


SIDES: dict[str, Callable[[str, int], Any]] = {
    "omnitrain": Omnitrain,
    "by_hand": ByHand,
    "same_forward": SameForward,
}


def sides_of(kind: str) -> tuple[str, ...]:
    """Return the sides of a model."""
    return tuple(side for side in SIDES if kind == "text" or side not in TEXT_ONLY)


def _hf_batch(pack: Pack) -> dict[str, torch.Tensor]:
    """The arguments of HF's forward for a packed sequence."""
    labels = torch.full_like(pack.input_ids, IGNORED)
    labels[0, pack.text_rows + 1] = pack.text_labels
    positions = pack.position_ids
    if positions.ndim == 3 and positions.size(0) == 3:  # by the fourth axis, the first, HF keeps samples apart
        along = torch.cat([torch.arange(length) for length in pack.info.lengths])
        positions = torch.cat([along[None, None], positions])
    media = {name: t for batch in pack.inputs.values() for group in batch.groups for name, t in group.features.items()}
    return {"input_ids": pack.input_ids, "labels": labels, "position_ids": positions, **pack.token_inputs, **media}


def time_on_rank(kind: str, tokens: int, rounds: int, steps: int) -> dict[str, dict[str, list[float]]]:
    """All sides in turn, on one of the ranks: side -> ``seconds`` and ``cpu_seconds`` per step, ``losses``."""
    sides = {name: SIDES[name](kind, tokens) for name in sides_of(kind)}
    found: dict[str, dict[str, list[float]]] = {
        name: {"seconds": [], "cpu_seconds": [], "losses": [side.run(), side.run()]} for name, side in sides.items()
    }
    for index in range(rounds):
        for name in in_turn(tuple(sides), index):
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            found[name]["losses"] += [sides[name].run() for _ in range(steps)]
            dist.barrier()
            found[name]["seconds"].append((time.perf_counter() - wall) / steps)
            found[name]["cpu_seconds"].append((time.process_time() - cpu) / steps)
    for side in sides.values():
        side.close()
    return found


def peak_bytes_on_rank(kind: str, tokens: int, name: str) -> int:
    """Largest sum of live tensor bytes in the second step of a side."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        side = SIDES[name](kind, tokens)
        side.run()
        gc.collect()
        with record_function("measured step"):
            side.run()
        side.close()
    events = sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    (step,) = [event for event in events if event.name() == "measured step"]
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    live = accumulate(size for _, size in changes)
    return max(size for (at, _), size in zip(changes, live, strict=True) if step.start_ns() <= at <= step.end_ns())


def _check_losses(found: list[dict[str, dict[str, list[float]]]]) -> None:
    """The same samples, weights and updates: losses must follow each other, or one side did other work."""
    first = found[0]["omnitrain"]["losses"]
    for name in found[0]:
        if name != "omnitrain":
            total = [sum(parts) for parts in zip(*(rank[name]["losses"] for rank in found), strict=True)]
            torch.testing.assert_close(torch.tensor(total), torch.tensor(first), rtol=1e-4, atol=0)


def measure(rounds: int, steps: int, tokens: int) -> Result:
    """Measure both models."""
    ratios, measured, peaks = {}, {}, {}
    with RankPool(RANKS, preload=("layouts",)) as pool:
        for kind in CONFIGS:
            found = pool.run("layouts:time_on_rank", kind, tokens, rounds, steps, timeout_s=TIMEOUT_SECONDS)
            _check_losses(found)
            for unit in ("seconds", "cpu_seconds"):
                measured |= {f"{kind}_{side}_{unit}": values[unit] for side, values in found[0].items()}
            for side in found[0]:
                ranks = pool.run("layouts:peak_bytes_on_rank", kind, tokens, side, timeout_s=TIMEOUT_SECONDS)
                peaks[kind, side] = ranks[0]
    for kind in CONFIGS:
        ours = measured[f"{kind}_omnitrain_seconds"], measured[f"{kind}_omnitrain_cpu_seconds"]
        for side in sides_of(kind)[1:]:
            over = "" if side == "by_hand" else f"_over_{side}"
            theirs = measured[f"{kind}_{side}_seconds"], measured[f"{kind}_{side}_cpu_seconds"]
            ratios[f"{kind}_time_ratio{over}"] = _median_ratio(ours[0], theirs[0])
            ratios[f"{kind}_cpu_ratio{over}"] = _median_ratio(ours[1], theirs[1])
            ratios[f"{kind}_memory_ratio{over}"] = peaks[kind, "omnitrain"] / peaks[kind, side]
    return Result(
        name="layouts",
        formula=FORMULA,
        figures={
            **ratios,
            **{f"{kind}_{side}_peak_mib": peak / 2**20 for (kind, side), peak in peaks.items()},
            **{f"{name}_per_step": median(values) for name, values in measured.items()},
            "tokens_per_rank": float(tokens),
        },
        rounds=measured,
    )


def _median_ratio(ours: list[float], theirs: list[float]) -> float:
    return median(a / b for a, b in zip(ours, theirs, strict=True))


def main() -> None:
    """Measure and report."""
    options = parser(sys.modules[__name__].__doc__ or "", rounds=7, steps=3)
    options.add_argument("--tokens", type=int, default=1024, help="tokens of each rank in a step")
    given = start(options)
    report(measure(given.rounds, given.steps, given.tokens), given.json)


if __name__ == "__main__":
    main()

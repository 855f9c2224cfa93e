"""Encoders on all ranks: the time of a step, against the ideal that the measured costs give.

Two ranks with one core each train a Qwen3-VL, in four cases; the two sides of each take turns.

``pipeline``: two stages, with few images (``text``) and with many (``images``): the first stage encodes, or both ranks
do. ``tensor``: two tensor parallel ranks: both encode each image (``local``), or each encodes half of them (``group``).
``data``: one of two data-parallel ranks has all the images: it encodes them, or both do (``world``). ``balanced``: both
have the same images, so ``world`` has nothing to move.

The cost of the encoder is measured in the same rounds, on a copy of the model without other ranks, as the processor's
seconds of its forward and backward. The ideal divides it equally among the ranks, and moves features in no time; for
the pipeline, the simulator runs the schedule with the measured seconds of its stages. ``of_ideal`` is the ideal time of
a step over the measured one. ``gain`` is the time without sharing over the time with it, ``gain_ideal`` what the ideal
would give. With ``--bits``, all traffic of the ranks is limited.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from harness import Result, in_turn, parser, report, start
from slow_link import joined_ranks, limit, may_limit, run_ranks
from transformers import AutoConfig

from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import MediaItem, MediaSpan, Sample
from omnitrain.models.hf.load import foundation_class
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.parallelize import build_parallelize_model
from omnitrain.parallel.schedule.executor import Executor
from omnitrain.parallel.schedule.table import schedule_of
from omnitrain.parallel.state import init_parallel_state
from omnitrain.parallel.step.plan import step_planner
from omnitrain.plan.schedule.actions import Action, Kind
from omnitrain.plan.schedule.simulate import simulate
from omnitrain.recipe.parallel import ComponentPlan, ParallelPlan

FORMULA = "of_ideal = ideal seconds of a step / measured seconds; gain = seconds without sharing / seconds with it"
IMAGE = 190  # placeholder
TP_PLAN = {
    **{f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
    "layers.*.self_attn.o_proj": "rowwise",
    **{f"layers.*.mlp.{name}_proj": "colwise" for name in ("gate", "up")},
    "layers.*.mlp.down_proj": "rowwise",
}
MICRO_BATCHES = 4
RANKS = 2
SIZES = ("width", "text", "grid")


@dataclass(frozen=True)
class Case:
    """A comparison.

    Attributes:
        degrees: of the foundation.
        images: for each data-parallel rank, images in each of its micro-batches.
        sides: ``place`` without sharing, and with it.
    """

    degrees: dict[str, int]
    images: tuple[int, ...]
    sides: tuple[str, str]


CASES = {
    "pipeline_text": Case({"pp": 2}, (1,), ("local", "world")),
    "pipeline_images": Case({"pp": 2}, (4,), ("local", "world")),
    "tensor": Case({"tp": 2}, (4,), ("local", "group")),
    "data": Case({"dp_replicate": 2}, (4, 0), ("local", "world")),
    "balanced": Case({"dp_replicate": 2}, (4, 4), ("local", "world")),
}


def model_of(width: int) -> OmniModel:
    """A Qwen3-VL whose tower needs about as long for an image as the foundation for its tokens and some text."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_vl",
        text_config={
            "vocab_size": 256,
            "hidden_size": width,
            "intermediate_size": 3 * width,
            "num_hidden_layers": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": width // 4,
            "rope_parameters": {"rope_type": "default", "mrope_section": [width // 16, width // 32, width // 32]},
        },
        vision_config={
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "depth": 4,
            "num_heads": 4,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 256,
            "out_hidden_size": width,
            "deepstack_visual_indexes": [1],
        },
        image_token_id=IMAGE,
        video_token_id=191,
        vision_start_token_id=192,
        vision_end_token_id=193,
    )
    foundation = foundation_class(config)(config)
    return build_omni_model(foundation=foundation).train()


def pack_of(model: OmniModel, images: int, text: int, grid: int, seed: int, *, has_media: bool = True) -> Pack:
    """One sample: images of ``grid`` x ``grid`` patches, or as many tokens of text that is not trained, then text."""
    generator = np.random.default_rng(seed)
    tokens = grid * grid // 4
    ids, spans = [], []
    if not has_media:
        ids, images = generator.integers(3, 180, images * (tokens + 2)).tolist(), 0
    for _ in range(images):
        pixels = generator.standard_normal((grid * grid, 3 * 2 * 4 * 4), dtype=np.float32)
        item = MediaItem({"pixel_values": pixels, "image_grid_thw": np.array([[1, grid, grid]])}, tokens)
        spans.append(MediaSpan("foundation.image", len(ids) + 1, item, is_target=False))
        ids += [192, *[IMAGE] * tokens, 193]
    ids = np.array([*ids, *generator.integers(3, 180, text)])
    trained = np.arange(len(ids)) >= len(ids) - text + 1
    native = model.runner.native
    media = {"image_grid_thw": np.array([[1, grid, grid]] * images)} if images else {}
    extras = native.extras(ids, trained)
    positions = native.positions(ids, media, extras)
    sample = Sample(f"{seed}", "made", ids, trained, positions, tuple(spans), index=seed, token_inputs=extras)
    return Pack.from_samples([sample])


def timed(run: Any, executor: Timed, action: Action) -> None:
    """Run one action, and note the processor's seconds."""
    began = time.thread_time()
    run(executor, action)
    assert action.stage is not None
    executor.taken[action.kind, action.stage].append(time.thread_time() - began)


class Timed(Executor):
    """Measures the processor's seconds of the forwards and backwards of each stage."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.taken: dict[tuple[Kind, int], list[float]] = defaultdict(list)

    _RUN: ClassVar = {
        kind: partial(timed, run) if kind in (Kind.F, Kind.B) else run for kind, run in Executor._RUN.items()
    }


@dataclass
class Side:
    """One of the two sides of a case on this rank."""

    model: OmniModel
    batch: Any

    def step(self) -> tuple[float, dict[tuple[Kind, int], float]]:
        """Run a step; return its seconds on the slowest rank, and those of the actions of this rank's stages."""
        executor = Timed(self.model, self.batch, {})
        schedule = schedule_of(self.model, self.batch.plan)
        dist.barrier()
        began = time.perf_counter()
        executor.run(schedule)
        taken = torch.tensor(time.perf_counter() - began)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        self.model.zero_grad(set_to_none=True)
        return taken.item(), {key: sum(values) / len(values) for key, values in executor.taken.items()}


def side_of(case: Case, place: str, sizes: dict[str, int]) -> Side:
    """Build a side; all ranks call it."""
    state = init_parallel_state(**{f"{axis}_size": degree for axis, degree in case.degrees.items()})
    plan = ParallelPlan(
        components={"image_encoder": ComponentPlan(place=place)}, tp_plan=TP_PLAN if "tp" in case.degrees else None
    )
    model = model_of(sizes["width"])
    images = case.images[state.dp_rank]
    packs = [pack_of(model, images, sizes["text"], sizes["grid"], seed) for seed in range(MICRO_BATCHES)]
    model = build_parallelize_model(model, parallel_state=state, parallel_plan=plan, enable_mixed_precision=False)
    return Side(model, step_planner(model)(packs))


def seconds_of_encoder(model: OmniModel, pack: Pack) -> dict[Kind, float]:
    """The processor's seconds of the encoder's forward and backward over the images of a pack."""
    began = time.thread_time()
    encoded = model.encode_media(pack)
    ended = time.thread_time()
    outputs = [tensor for features in encoded.native.values() for tensor in features.tensors()]
    torch.autograd.backward(outputs, [torch.ones_like(tensor) for tensor in outputs])
    found = {Kind.ENCODE: ended - began, Kind.ENCODE_B: time.thread_time() - ended}
    model.zero_grad(set_to_none=True)
    return found


def ideal_of(case: Case, shared: Side, measured: dict[str, float], encoder: dict[Kind, float], durations: Any) -> float:
    """Seconds of a step whose encoder is divided equally, at no cost."""
    of_step = {kind: seconds * MICRO_BATCHES for kind, seconds in encoder.items()}
    if "pp" not in case.degrees:  # both have half of what the busiest rank had alone
        is_balanced = len(set(case.images)) == 1 and "tp" not in case.degrees
        return measured[case.sides[0]] - (0.0 if is_balanced else sum(of_step.values()) / 2)
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, durations)
    of_stage = {key: seconds for one in everyone for key, seconds in one.items()}
    of_stage |= {kind: seconds / 2 for kind, seconds in of_step.items()}
    return float(simulate(schedule_of(shared.model, shared.batch.plan), of_stage).makespan)


def run_rank(given: argparse.Namespace) -> dict[str, list[float]]:
    """Measure all cases on one rank; return figure -> its value in each round."""
    sizes = {name: getattr(given, name) for name in SIZES}
    found: dict[str, list[float]] = defaultdict(list)
    alone = model_of(given.width)
    sides = {name: {place: side_of(case, place, sizes) for place in case.sides} for name, case in CASES.items()}
    for prefix in ("", *(["limited_"] if given.bits else [])):
        if prefix and dist.get_rank() == 0:
            limit(given.bits)
        for (name, case), index in product(CASES.items(), range(-1, given.rounds)):  # one round to warm up
            images = pack_of(alone, max(case.images), given.text, given.grid, 0)
            steps = {place: sides[name][place].step() for place in in_turn(case.sides, index)}
            encoder = seconds_of_encoder(alone, images)
            measured = {place: seconds for place, (seconds, _) in steps.items()}
            shared = case.sides[1]
            ideal = ideal_of(case, sides[name][shared], measured, encoder, steps[shared][1])
            if index >= 0:
                without = measured[case.sides[0]]
                found[f"{prefix}{name}_of_ideal"].append(ideal / measured[shared])
                found[f"{prefix}{name}_gain"].append(without / measured[shared])
                found[f"{prefix}{name}_gain_ideal"].append(without / ideal)
                found[f"{prefix}{name}_seconds"].append(measured[shared])
                found[f"{prefix}{name}_encoder_seconds"].append(sum(encoder.values()) * MICRO_BATCHES)
    return found


def main() -> None:
    """See the top of this file."""
    options = parser(__doc__ or "", rounds=7, steps=1)
    options.add_argument("--width", type=int, default=192, help="of the model")
    options.add_argument("--text", type=int, default=256, help="tokens of text in a pack")
    options.add_argument("--grid", type=int, default=16, help="patches of an image along each side")
    options.add_argument("--bits", type=float, default=1e9, help="per second on the limited link; 0: no limited rounds")
    options.add_argument("--as-rank", action="store_true", help="be one of the ranks")
    given = start(options)
    if given.as_rank:
        with joined_ranks():
            print(json.dumps(run_rank(given)))
        return
    if given.bits and not may_limit():
        print("without a slow network: cannot limit the loopback; run as root with iproute2 (ip, tc)")
        given.bits = 0.0
    arguments = [f"--{name}={getattr(given, name)}" for name in (*SIZES, "rounds", "bits")]
    rounds = run_ranks(__file__, arguments, ranks=RANKS, is_limited=bool(given.bits))
    figures = {name: median(values) for name, values in rounds.items()}
    report(Result("encoders", FORMULA, figures, rounds), given.json)


if __name__ == "__main__":
    main()

"""Loading: four ranks read their shards of a checkpoint that is made on the spot.

A Qwen3-MoE with a vision tower, in fp32, saved with a tensor for each expert. For each layout, new ranks load it once,
while a thread of each samples the anonymous memory of the process (``RssAnon``: without files that are mapped). Then
they load it again in each round, after or before they read as many bytes plainly: ``readinto`` into new memory, from
the same file, all ranks at once. Sides take turns. The files are in the page cache, and each rank has one thread.

The seconds of a load are those from the first read to the end of the last one, FSDP's work on each unit included.
"""

from __future__ import annotations

import gc
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from harness import Result, in_turn, parser, report, settle, start
from torch.distributed.tensor import DTensor

from omnitrain.models.hf.stored_values import FILES
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.fsdp.weight_loader import WeightLoader
from omnitrain.parallel.parallelize import build_parallelize_model
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.state import init_state_of
from omnitrain.recipe.layout import parse_layout

FORMULA = (
    "rate = median over rounds of (seconds of reading as many bytes plainly / seconds of a load), of the slowest rank; "
    "read = bytes of slices that a rank asked for / bytes of its shard, of the rank with the most; memory = anonymous "
    "memory above the level before a load / (shard + largest tensor), of the rank with the most; first = bytes of "
    "memory of rank 0 / the most of the others"
)
LAYOUTS = {"fsdp": "dp4", "tp": "tp2.dp2", "ep": "dp4.ep4", "pp": "pp2.dp2.accum2", "section": "vision1+dp3"}
RANKS = 4
TIMEOUT_SECONDS = 1800.0
SAMPLE_SECONDS = 0.002


def parts_of(width: int) -> dict[str, Any]:
    """The parts of the model: 460 million parameters at a width of 1024."""
    text = {
        "model_type": "qwen3_moe",
        "vocab_size": 32 * width,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "moe_intermediate_size": 3 * width // 4,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": width // 8,
        "num_experts": 16,
        "num_experts_per_tok": 2,
    }
    tower = {
        "model_type": "siglip_vision_model",
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "image_size": 32,
        "patch_size": 8,
        "vision_use_head": False,
    }
    return {"foundation": text, "encoders": {"image_encoder": {"tower": {"config": tower}}}}


def anonymous_bytes() -> int:
    """Anonymous memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


class Memory:
    """The most anonymous memory of this process within a context, above that before it."""

    def __enter__(self) -> Memory:
        gc.collect()
        self._before = self._most = anonymous_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            self._most = max(self._most, anonymous_bytes())

    @property
    def num_bytes(self) -> int:
        """The most bytes."""
        return self._most - self._before


@contextmanager
def timed_reads() -> Iterator[list[float]]:
    """Note the times of the first read of a load, and of its end."""
    times: list[float] = []
    finish = WeightLoader.finish

    def finished(loader: WeightLoader) -> None:
        finish(loader)
        times.append(time.perf_counter())

    FILES.on_read = lambda: times.append(time.perf_counter()) if not times else None
    with patch.object(WeightLoader, "finish", finished):
        yield times
    FILES.on_read = None


def loaded(folder: Path, layout: str) -> OmniModel:
    """The model under a layout, of the weights in a folder."""
    plan = parse_layout(layout).plan()
    bare = build_omni_model(config_path=folder, init_device="meta")
    return build_parallelize_model(bare, folder, init_state_of(plan), plan, enable_mixed_precision=False)


def shard_bytes(model: OmniModel) -> int:
    """Bytes of the parameters that this rank holds."""
    of_rank = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters() if not p.is_meta)
    return sum(tensor.nbytes for tensor in of_rank)


def seconds_of_load(folder: Path, layout: str) -> float:
    """Seconds of one load."""
    with timed_reads() as times:
        loaded(folder, layout)
    return times[1] - times[0]


def seconds_of_reading(folder: Path, num_bytes: int) -> float:
    """Seconds in which plain reads of the weights' file fill so many bytes of new memory."""
    file = folder / "model.safetensors"
    first = dist.get_rank() * (file.stat().st_size - num_bytes) // max(dist.get_world_size() - 1, 1)
    dist.barrier()
    began = time.perf_counter()
    with file.open("rb", buffering=0) as opened:
        opened.seek(first)
        into, at = memoryview(torch.empty(num_bytes, dtype=torch.uint8).numpy()), 0
        while at < num_bytes:
            at += opened.readinto(into[at : at + (8 << 20)])
    return time.perf_counter() - began


def measure_on_rank(folder: Path, layout: str, rounds: int) -> dict[str, Any]:
    """What one rank reads, how much memory that takes, and its seconds in each round."""
    settle()
    loaded_before = build_omni_model(config_path=folder, init_device="meta")
    assert loaded_before.runner.contract is not None  # measured on a tiny model, which is not what is measured here
    largest = max(parameter.nbytes for parameter in loaded_before.parameters())
    before = FILES.num_bytes
    with Memory() as memory:
        model = loaded(folder, layout)
    read, shard = FILES.num_bytes - before, shard_bytes(model)
    del model
    found: dict[str, list[float]] = {"load": [], "plain": []}
    for index in range(-1, rounds):  # one round to warm up
        for side in in_turn(("load", "plain"), index):
            gc.collect()
            seconds = seconds_of_load(folder, layout) if side == "load" else seconds_of_reading(folder, read)
            if index >= 0:
                found[side].append(seconds)
    return {"read": read, "shard": shard, "largest": largest, "memory": memory.num_bytes, **found}


def figures_of(layout: str, found: list[dict[str, Any]]) -> dict[str, float]:
    """The figures of a layout, of what its ranks found."""
    first, *others = [of_rank["memory"] for of_rank in found]
    rates = [[plain / load for plain, load in zip(of_rank["plain"], of_rank["load"], strict=True)] for of_rank in found]
    return {
        f"{layout}_rate": min(median(of_rank) for of_rank in rates),
        f"{layout}_read": max(of_rank["read"] / of_rank["shard"] for of_rank in found),
        f"{layout}_memory": max(f["memory"] / (f["shard"] + f["largest"]) for f in found),
        f"{layout}_first": max(first, 1) / max(*others, 1),
        f"{layout}_mb_per_second": min(f["read"] / 1e6 / median(f["load"]) for f in found),
    }


def main() -> None:
    """Measure and report."""
    options = parser(str(__doc__), rounds=7, steps=0)
    options.add_argument("--width", type=int, default=1024, help="of the model; 1024: 2 GB")
    given = start(options)
    figures: dict[str, float] = {}
    rounds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = build_omni_model(**parts_of(given.width))
        model.save_pretrained(folder, max_shard_size="1TB")
        del model
        for layout, word in LAYOUTS.items():
            with RankPool(RANKS) as pool:
                found = pool.run(measure_on_rank, folder, word, given.rounds, timeout_s=TIMEOUT_SECONDS)
            figures |= figures_of(layout, found)
            rounds |= {f"{layout}_{side}": found[0][side] for side in ("load", "plain")}
        figures["checkpoint_mb"] = (folder / "model.safetensors").stat().st_size / 1e6
    report(Result("load", FORMULA, figures, rounds), given.json)


if __name__ == "__main__":
    main()

"""Saves: how long a step stands still for a checkpoint, written by a process of its own or waited for.

Two ranks train the quickstart's model with a larger foundation, in fp32 (FSDP2, AdamW). ``fit`` saves every few steps;
the sides take turns, on the same model, in the same run, and no save begins before the last one is written.
``blocked`` are the seconds of ``Saves.save``, of the slowest rank.

Memory is sampled during a save of the process of its own, above the level before: anonymous memory of the rank and of
the process that writes (which has then written once), and the memory that both share.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from harness import QUICKSTART, Result, in_turn, parser, report, settle, start
from torch import Tensor
from torch.distributed.tensor import DTensor

from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.recipe import Recipe
from omnitrain.train.trainer import Trainer

FORMULA = (
    "blocked = median over rounds of (seconds that a step waits for a save by a process of its own / seconds that it "
    "waits for a save by itself), each of the slowest rank; memory = bytes of such a save / (bytes that the rank "
    "writes + largest tensor), of the rank with the most; step_while_writing = seconds of a step while a checkpoint is "
    "written / seconds of other steps"
)
RANKS = 2
TIMEOUT_SECONDS = 1800.0
SAMPLE_SECONDS = 0.002
WARM_UP = 2  # the first own process of these has to start, the second is sampled
SIDES = ("own_process", "waits")


def recipe_of(folder: Path, width: int, rounds: int, steps: int) -> Recipe:
    """The quickstart with a foundation of twelve layers; at a width of 768 a checkpoint takes 1.3 GB."""
    foundation = {"hidden_size": width, "intermediate_size": 4 * width, "head_dim": width // 4, "num_hidden_layers": 12}
    changes = [f"model.foundation.config.{key}={value}" for key, value in foundation.items()]
    changes += ["data.pack_tokens=64", "data.overlong=drop", "data.workers=0", "data.heldout=[]", "evaluation=null"]
    total = steps * (len(SIDES) * (WARM_UP + rounds) + 1)
    changes += [f"train.steps={total}", f"train.save.every={steps}", "train.save.keep_last=1", "train.report=false"]
    return Recipe.load(QUICKSTART, [*changes, f"train.packs_per_step={RANKS}", f"output_dir={folder / 'run'}"])


def anonymous_bytes(process: int | str) -> int:
    """Anonymous memory of a process."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


class Memory:
    """The most memory that the save of a process of its own took, above the level before the save."""

    def __init__(self) -> None:
        self.most = 0
        self._ended = threading.Event()

    def follow(self, trainer: Trainer) -> Callable[[], None]:
        """Sample from now on, until the function that is returned is called."""
        writer = trainer.saver._writer
        assert writer is not None, "the first save has started it"
        process = writer._process.pid
        before = anonymous_bytes("self") + anonymous_bytes(process)

        def sample() -> None:
            while not self._ended.wait(SAMPLE_SECONDS):
                shared = len(writer._memory._memory)
                self.most = max(self.most, anonymous_bytes("self") + anonymous_bytes(process) - before + shared)

        thread = threading.Thread(target=sample)
        thread.start()

        def end() -> None:
            self._ended.set()
            thread.join()

        return end


def local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def measure_on_rank(folder: Path, width: int, rounds: int, steps: int) -> dict[str, Any]:
    """Seconds of each save and each step, and the memory of a save."""
    settle()
    trainer = Trainer(recipe_of(folder, width, rounds, steps))
    order = [side for index in range(-WARM_UP, rounds) for side in in_turn(SIDES, index)]
    found: dict[str, Any] = {"own_process": [], "waits": [], "writing": [], "alone": []}
    save, train_step, memory = trainer.saves.save, trainer.train_step, Memory()

    def timed_save(*, waits: bool = True) -> Path:
        if not order:  # the last one of the run
            return save(waits=waits)
        side = order.pop(0)
        trainer.saver.finish()
        trainer.ranks.peers.any(False)
        is_measured = len(order) < len(SIDES) * rounds
        end = memory.follow(trainer) if side == "own_process" and not is_measured and trainer.saver._writer else None
        began = time.perf_counter()
        path = save(waits=side == "waits")
        if is_measured:
            found[side].append(time.perf_counter() - began)
        if end is not None:
            trainer.saver.finish()
            end()
        return path

    def timed_step(batch: Any) -> Any:
        trainer.ranks.peers.any(False)
        began, was_writing = time.perf_counter(), trainer.saver.is_writing
        result = train_step(batch)
        if trainer.saver.is_writing == was_writing:
            found["writing" if was_writing else "alone"].append(time.perf_counter() - began)
        return result

    trainer.saves.save, trainer.train_step = timed_save, timed_step  # type: ignore[method-assign]
    trainer.fit()
    held = [
        *trainer.model.parameters(),
        *(v for s in trainer.optimizer.state.values() for v in s.values() if torch.is_tensor(v)),
    ]
    found["shard"] = sum(local(tensor).nbytes for tensor in held)
    found["largest"] = max(tensor.numel() * tensor.element_size() for tensor in held)
    found["memory"] = memory.most
    return found


def main() -> None:
    """Measure and report."""
    options = parser(str(__doc__), rounds=7, steps=8)
    options.add_argument("--width", type=int, default=768, help="of the model; 768: 1.3 GB of checkpoint")
    given = start(options)
    with tempfile.TemporaryDirectory() as name, RankPool(RANKS) as pool:
        arguments = (Path(name), given.width, given.rounds, given.steps)
        found = pool.run(measure_on_rank, *arguments, timeout_s=TIMEOUT_SECONDS)
    rounds = {side: [max(pair) for pair in zip(*(of_rank[side] for of_rank in found), strict=True)] for side in SIDES}
    blocked = [own / waits for own, waits in zip(*rounds.values(), strict=True)]
    figures = {
        "blocked": median(blocked),
        "memory": max(of_rank["memory"] / (of_rank["shard"] + of_rank["largest"]) for of_rank in found),
        "step_while_writing": median(found[0]["writing"]) / median(found[0]["alone"]) if found[0]["writing"] else 1.0,
        **{f"{side}_seconds": median(seconds) for side, seconds in rounds.items()},
        "shard_mb": found[0]["shard"] / 1e6,
    }
    report(Result("checkpoint", FORMULA, figures, rounds), given.json)


if __name__ == "__main__":
    main()

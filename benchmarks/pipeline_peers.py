"""Our executor against torch's own runtime of pipelines: the same model, packs and order of a step, equal losses.

The sides take turns in the same processes: ``torch`` is ``torch.distributed.pipelining`` with stages made by hand of a
Qwen3's modules, ``ours`` is a model parallelized with ``pp``, and :func:`accumulate_gradients`. The gradients of a step
are compared, too. ``sleep``: 4 ranks, 8 micro-batches; each stage sleeps 0.05 s in its forward and twice as long in its
backward, so that a step costs the same on any machine, and what is left is waiting. ``compute``: 2 ranks, one core
each. ``cpu``: processor seconds of all ranks. ``host``: milliseconds of the processor in a forward of a stage of one
block, of a model with few blocks and with many in the other stage.
"""

from __future__ import annotations

import os
import time
from functools import partial
from itertools import accumulate, pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from harness import Result, in_turn, parser, report, settle, start
from pipeline import _SleepInBackward, model_of, packs_of
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from omnitrain.data.packing.pack import Pack
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.parallelize import build_parallelize_model
from omnitrain.parallel.schedule.accumulate import accumulate_gradients
from omnitrain.parallel.schedule.executor import Executor
from omnitrain.parallel.schedule.table import schedule_of
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.state import init_parallel_state
from omnitrain.parallel.step.plan import step_planner
from omnitrain.recipe.parallel import ComponentPlan, ParallelPlan
from omnitrain.recipe.plan_groups import PipelineSchedule

FORMULA = "median over rounds of our seconds of a step / torch's seconds; cpu: the same of processor seconds"
SECONDS = 0.05  # of a stage's forward; its backward sleeps twice as long
CHUNKS = {"1f1b": 1, "interleaved": 2}  # kind -> stages per rank
MICRO_BATCHES = 8


def sleeping(_block: nn.Module, _arguments: Any, output: Tensor) -> Tensor:
    """Sleep as long as a stage takes."""
    time.sleep(SECONDS)
    return _SleepInBackward.apply(output, 2 * SECONDS)


class ByHand(nn.Module):
    """A stage of a Qwen3, made of its modules."""

    def __init__(self, foundation: Any, first: int, stop: int) -> None:
        super().__init__()
        body = foundation.model
        self.embed = body.embed_tokens if first == 0 else None
        self.blocks, self.rotary = body.layers[first:stop], body.rotary_emb
        is_last = stop == len(body.layers)
        self.norm, self.head = (body.norm, foundation.lm_head) if is_last else (None, None)

    def forward(self, hidden: Tensor) -> Tensor:
        """Ids ``[1, t]`` or states ``[1, t, hidden]`` to states, or of the last stage to logits."""
        hidden = hidden if self.embed is None else self.embed(hidden)
        positions = self.rotary(hidden, torch.arange(hidden.size(1))[None])
        for block in self.blocks:
            hidden = block(hidden, attention_mask=None, position_embeddings=positions)
        return hidden if self.head is None else self.head(self.norm(hidden))


def split_of(blocks: int, stages: int) -> list[tuple[int, int]]:
    """Return the blocks of each stage: first, and after the last."""
    return list(pairwise(accumulate([blocks // stages] * stages, initial=0)))


class Torch:
    """A step by torch's runtime."""

    def __init__(self, kind: str, ranks: int, blocks: int, width: int, packs: list[Pack]) -> None:
        chunks, self.foundation = CHUNKS[kind], foundation_of(blocks, width)
        spans, rank = split_of(blocks, ranks * chunks), dist.get_rank()
        self.modules = [ByHand(self.foundation, *span) for span in spans[rank::ranks]]
        self.blocks = [self.foundation.model.layers[stop - 1] for _, stop in spans[rank::ranks]]
        device = torch.device("cpu")
        stages = [
            PipelineStage(module, rank + ranks * index, len(spans), device) for index, module in enumerate(self.modules)
        ]
        self.ids = torch.cat([pack.input_ids for pack in packs])
        count = self.ids[:, 1:].numel()

        def loss(logits: Tensor, ids: Tensor) -> Tensor:
            return nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum") / count

        how: dict[str, Any] = {"loss_fn": loss, "scale_grads": False}
        self.schedule: Any = (
            Schedule1F1B(stages[0], len(packs), **how)
            if kind == "1f1b"
            else ScheduleInterleaved1F1B(stages, len(packs), **how)
        )
        self.has = {"first": rank == 0, "last": rank == ranks - 1}

    def step(self) -> float:
        """Run one step; return this rank's part of the loss."""
        losses: list[Tensor] = []
        inputs = [self.ids] if self.has["first"] else []
        self.schedule.step(*inputs, **({"target": self.ids, "losses": losses} if self.has["last"] else {}))
        return sum(loss.item() for loss in losses)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradient of each block's parameters on this rank, which must not be kept."""
        found = {name: p.grad for name, p in self.foundation.named_parameters() if p.grad is not None}
        self.foundation.zero_grad(set_to_none=True)
        return found


class Ours:
    """A step by our executor."""

    def __init__(self, kind: str, ranks: int, blocks: int, width: int, packs: list[Pack]) -> None:
        self.model = on_stages(kind, ranks, blocks, width, [blocks // (ranks * CHUNKS[kind])] * (ranks * CHUNKS[kind]))
        spans = split_of(blocks, ranks * CHUNKS[kind])[dist.get_rank() :: ranks]
        layers: Any = self.model.foundation.model.layers
        self.blocks = [layers[stop - 1] for _, stop in spans]
        self.batch = step_planner(self.model)(packs)

    def step(self) -> float:
        """Run one step; return this rank's part of the loss."""
        return accumulate_gradients(self.model, self.batch).item()

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients on this rank, which must not be kept."""
        foundation = self.model.foundation
        found = {n: p.grad.full_tensor() for n, p in foundation.named_parameters() if p.grad is not None}
        self.model.zero_grad(set_to_none=True)
        return found


def foundation_of(blocks: int, width: int) -> Any:
    """A Qwen3 of equal blocks, the same on every call, with torch's attention."""
    foundation = model_of(blocks, width).foundation
    foundation.set_attn_implementation("sdpa")
    return foundation


def on_stages(kind: str, ranks: int, blocks: int, width: int, split: list[int]) -> OmniModel:
    """The same Qwen3 on stages of ours."""
    more = {"chunks": CHUNKS[kind]} if CHUNKS[kind] > 1 else {}
    schedule = PipelineSchedule(kind=kind, split=split, **more)
    plan = ParallelPlan(components={"foundation": ComponentPlan(schedule=schedule)})
    state = init_parallel_state(pp_size=ranks)
    model = model_of(blocks, width)
    return build_parallelize_model(model, parallel_state=state, parallel_plan=plan, enable_mixed_precision=False)


def one_step(side: Torch | Ours) -> tuple[float, float, float, dict[str, Tensor]]:
    """Return seconds and processor seconds of a step and its loss, over all ranks, and gradients of this rank."""
    dist.barrier()
    began, cpu = time.perf_counter(), time.process_time()
    loss = side.step()
    wall = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    sums = torch.tensor([time.process_time() - cpu, loss], dtype=torch.float64)
    dist.all_reduce(wall, dist.ReduceOp.MAX)
    dist.all_reduce(sums)
    return wall.item(), *sums.tolist(), side.gradients()


def require_equal(losses: dict[str, float], gradients: dict[str, dict[str, Tensor]]) -> None:
    """Both sides computed the same."""
    assert abs(losses["ours"] - losses["torch"]) < 1e-6 * abs(losses["torch"]), losses
    assert gradients["ours"].keys() == gradients["torch"].keys()
    for name, gradient in gradients["torch"].items():
        torch.testing.assert_close(gradients["ours"][name], gradient, rtol=1e-4, atol=1e-7)


def on_rank(
    ranks: int, blocks: int, width: int, tokens: int, rounds: int, steps: int, sleeps: bool
) -> dict[str, list[float]]:
    """Measure both kinds of schedule on one rank; return what was measured in each round, the same on all ranks."""
    settle()
    packs, found = packs_of(MICRO_BATCHES, tokens), {}
    for kind in CHUNKS:
        sides = {"torch": Torch(kind, ranks, blocks, width, packs), "ours": Ours(kind, ranks, blocks, width, packs)}
        for block in [block for side in sides.values() for block in side.blocks] if sleeps else ():
            block.register_forward_hook(sleeping)
        for what in ("seconds", "cpu_seconds"):
            found |= {f"{kind}_{side}_{what}": [] for side in sides}
        for index in range(-1, rounds):  # one round to warm up
            losses, gradients = {}, {}
            for name in in_turn(tuple(sides), index):
                each = [one_step(sides[name]) for _ in range(steps)]
                _, _, losses[name], gradients[name] = each[-1]
                if index >= 0:
                    found[f"{kind}_{name}_seconds"].append(sum(step[0] for step in each) / steps)
                    found[f"{kind}_{name}_cpu_seconds"].append(sum(step[1] for step in each) / steps)
            require_equal(losses, gradients)
    return found


def host_on_rank(blocks: int, rounds: int) -> list[float]:
    """Return milliseconds of the processor in a forward of the last stage, of one block, in each round."""
    settle()
    model = on_stages("1f1b", 2, blocks, 16, [blocks - 1, 1])
    batch = step_planner(model)(packs_of(MICRO_BATCHES, 8))
    schedule, taken = schedule_of(model, batch.plan), []

    class Timed(Executor):
        def _output(self, *arguments: Any) -> Any:
            began = time.thread_time()
            output = super()._output(*arguments)
            taken.append(1e3 * (time.thread_time() - began))
            return output

    of_rounds = []
    for _ in range(rounds + 1):
        taken.clear()
        Timed(model, batch, {}).run(schedule)
        of_rounds.append(median(taken))
        model.zero_grad(set_to_none=True)
    return of_rounds[1:]


def main() -> None:
    """See the top of this file."""
    options = parser(__doc__ or "", rounds=7, steps=1)
    options.add_argument("--blocks", type=int, nargs="*", default=[8, 32], help="of the models")
    options.add_argument("--width", type=int, default=256, help="of the model that computes")
    options.add_argument("--tokens", type=int, default=256, help="of its packs")
    given = start(options)
    figures = {"load_before": os.getloadavg()[0]}
    rounds: dict[str, list[float]] = {}
    run = partial(_measured, given.rounds, given.steps)
    for blocks in given.blocks:
        for name, sizes in {"sleep": (4, blocks, 16, 8), "compute": (2, blocks, given.width, given.tokens)}.items():
            found = run(*sizes, name == "sleep")
            for kind in CHUNKS:
                for what in ("seconds", "cpu_seconds"):
                    pairs = zip(found[f"{kind}_ours_{what}"], found[f"{kind}_torch_{what}"], strict=True)
                    of_cpu = "_cpu" if what == "cpu_seconds" else ""
                    figures[f"{name}_{blocks}_blocks_{kind}{of_cpu}"] = median(ours / torchs for ours, torchs in pairs)
            rounds |= {f"{name}_{blocks}_blocks_{key}": values for key, values in found.items()}
    for blocks in (4, 64):
        with RankPool(2, preload=("pipeline_peers",)) as pool:
            taken = pool.run("pipeline_peers:host_on_rank", blocks, given.rounds, timeout_s=300)[1]
        figures[f"host_{blocks}_blocks_ms"] = median(taken)
        rounds[f"host_{blocks}_blocks_ms"] = taken
    figures["load_after"] = os.getloadavg()[0]
    report(Result("pipeline_peers", FORMULA, figures, rounds), given.json)


def _measured(
    rounds: int, steps: int, ranks: int, blocks: int, width: int, tokens: int, sleeps: bool
) -> dict[str, list[float]]:
    sizes = ranks, blocks, width, tokens, rounds, steps, sleeps
    with RankPool(ranks, preload=("pipeline_peers",)) as pool:
        measure = pool.run("pipeline_peers:on_rank", *sizes, timeout_s=900)
    return measure[0]


if __name__ == "__main__":
    main()

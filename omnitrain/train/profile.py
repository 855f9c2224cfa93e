"""``omnitrain profile``: a few steps under torch's profiler, what they cost, and what to try."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from omnitrain.errors import UserError
from omnitrain.models.discovery.text_run import text_blocks
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.attention.entry import Attend, attending_through
from omnitrain.ops.attention.spec import AttentionCall
from omnitrain.ops.experts.weights import experts_in
from omnitrain.ops.timing import SpanRecorder, What
from omnitrain.recipe import Recipe
from omnitrain.recipe.train import Trace, Track
from omnitrain.train.metrics.console import console
from omnitrain.train.metrics.costs import (
    ATTENTION,
    EXPERTS,
    HEAD,
    LABEL,
    LAYERS,
    STEP,
    Costs,
    Facts,
    advice,
    cost_table,
    costs_of,
)
from omnitrain.train.metrics.step_timing import Stopwatch
from omnitrain.train.trainer import Trainer

_WARM_UP = 3  # steps before any are timed: they compile, and fill caches


def profile_recipe(recipe: Recipe, folder: Path, steps: int) -> Costs:
    """Run a few steps of a recipe, print what they cost, and write a trace of each rank. Every rank calls this.

    No run is opened: nothing is saved, evaluated or tracked. ``folder`` gets ``trace-rank-N.json.gz`` (for Perfetto)
    and ``costs.json``; ``steps`` are timed, and then as many profiled. Raises UserError.
    """
    trainer = Trainer(_without_run(recipe, folder, _WARM_UP + 2 * steps))
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if trainer.device.type == "cuda" else [])]
    with trainer.rehearsal() as step:
        for _ in range(_WARM_UP):
            step()
        line = _timed(trainer, step, steps)
        with _labelled(trainer), torch_profile(activities=activities) as profiled:
            for _ in range(steps):
                with record_function(STEP):
                    step()
                    _wait_for(trainer.device)
        trainer.ranks.peers.gather(None)  # all ranks have finished, before any leaves
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output: {folder} cannot be made: {error.strerror}") from None
    profiled.export_chrome_trace(str(folder / f"trace-rank-{trainer.ranks.peers.rank}.json.gz"))
    costs = costs_of(profiled.events())
    _tell(trainer, costs, line, steps, folder)
    return costs


def _without_run(recipe: Recipe, folder: Path, steps: int) -> Recipe:
    """The recipe without what a run writes, with FLOPs, and with at least ``steps`` steps."""
    experts = recipe.train.experts.model_copy(update={"record": None})
    train = {"steps": max(steps, recipe.train.steps), "epochs": None, "flops": True, "experts": experts}
    return recipe.model_copy(
        update={
            "output_dir": str(folder / "run"),  # which is never made
            "evaluation": None,
            "train": recipe.train.model_copy(update={**train, "trace": Trace(), "track": Track()}),
        }
    )


def _timed(trainer: Trainer, step: Callable[[], None], steps: int) -> dict[str, Any]:
    """Metrics of steps without the profiler."""
    _wait_for(trainer.device)
    trainer.measures.flops.read(trainer.ranks.peers, 1.0)  # drops the first steps
    trainer.measures.stopwatch = Stopwatch()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    _wait_for(trainer.device)
    seconds = time.perf_counter() - began
    recipe = trainer.recipe
    return {
        "seconds": seconds / steps,
        **trainer.measures.flops.read(trainer.ranks.peers, seconds),
        **trainer.measures.stopwatch.read(recipe.train.packs_per_step * recipe.data.pack_tokens),
    }


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Parts(SpanRecorder):
    """Records the calls of components for the profiler."""

    @contextmanager
    def span(self, what: What) -> Iterator[None]:
        """Record a call of a component, or the wait for its features."""
        with record_function(f"{LABEL}{'media of' if what.name == 'encode' else 'wait for features of'} {what.layer}"):
            yield


@contextmanager
def _labelled(trainer: Trainer) -> Iterator[None]:
    """Let the profile say which part of the model runs."""
    model, before = trainer.model, trainer.model.encode_recorder
    with ExitStack() as stack:
        if trainer.compiled is None:  # hooks inside of compiled blocks would break them up
            for part, module in _parts_of(model):
                stack.callback(_label(module, f"{LABEL}{part}"))
        model.encode_recorder = _Parts()
        stack.callback(setattr, model, "encode_recorder", before)
        stack.enter_context(attending_through(_attend))
        yield


def _parts_of(model: OmniModel) -> Iterator[tuple[str, nn.Module]]:
    foundation: Any = model.foundation
    yield "foundation", foundation
    yield HEAD, foundation.get_output_embeddings()
    blocks = text_blocks(foundation)
    yield from ((LAYERS, block) for block in blocks)
    yield from ((EXPERTS, experts) for block in blocks for _, experts in experts_in(block))


def _label(module: nn.Module, words: str) -> Callable[[], None]:
    running: list[record_function] = []

    def enter(*_: Any) -> None:
        running.append(record_function(words))
        running[-1].__enter__()

    def leave(*_: Any) -> None:
        running.pop().__exit__(None, None, None)

    # Recomputation stops early: torch raises inside it once every saved tensor exists.
    handles = [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def _attend(call: AttentionCall, attend: Attend) -> Tensor:
    with record_function(ATTENTION):
        return attend(call)


def _tell(trainer: Trainer, costs: Costs, line: Mapping[str, Any], steps: int, folder: Path) -> None:
    lines = list(advice(costs, _facts(trainer, line)))
    console.print(cost_table(costs, steps))
    for text in (*_speed(trainer, line), *(f"try: {text}" for text in lines)):
        console.print(text, soft_wrap=True, markup=False)
    if trainer.ranks.is_first:
        rows = [{"name": name, "share": sum(row.values()) / costs.seconds, **row} for name, row in costs.rows.items()]
        found = {"steps": steps, "profiled_seconds": costs.seconds, "rows": rows, "advice": lines, "metrics": line}
        (folder / "costs.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    console.print(f"wrote {folder}/trace-rank-*.json.gz (open in ui.perfetto.dev) and {folder}/costs.json")


def _speed(trainer: Trainer, line: Mapping[str, Any]) -> Iterator[str]:
    yield f"a step takes {1e3 * line['seconds']:.1f} ms without the profiler: {line['tokens_per_second']:,.0f} tokens/s"
    flops = line["flops"]
    if "per_step" not in flops:
        yield f"FLOPs are not counted: {flops['left_out']}"
        return
    ranks = trainer.ranks.peers.size
    yield (
        f"{flops['per_step']:.4g} FLOPs per step ({flops['per_step_full']:.4g} without causal masks, "
        f"{flops['per_step_hardware']:.4g} with recompute), {flops['per_token']:.4g} per token"
    )
    yield (
        f"MFU {line['mfu']:.1%} = {flops['per_step']:.4g} FLOPs / ({line['seconds']:.4g} s * {ranks} "
        f"rank{'s' * (ranks > 1)} * {flops['peak']:.4g} FLOPs/s); peak: {flops['peak_source']}"
    )
    for name, reason in flops.get("left_out", {}).items():
        yield f"the FLOPs of {name} are left out: {reason}"


def _facts(trainer: Trainer, line: Mapping[str, Any]) -> Facts:
    recipe, layout = trainer.recipe, trainer.layout
    plans = {} if layout is None else {name: found.plan for name, found in layout.components.items()}
    return Facts(
        ranks=trainer.ranks.peers.size,
        workers=recipe.data.workers,
        is_compiled=trainer.compiled is not None,
        packs_per_step=recipe.train.packs_per_step,
        fill=line["fill"],
        settings={name: plan.model_dump(exclude_none=True) for name, plan in plans.items()},
        imbalance={
            name: row["imbalance"] for name, row in trainer.measures.encoder_metrics.get("encoders", {}).items()
        },
    )

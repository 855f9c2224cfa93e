"""``omnitrain plan``: the best layouts of a recipe on devices that need not be here, and why others are not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Group, RenderableType
from rich.table import Column, Table

from omnitrain.data.packing.pack import Pack
from omnitrain.errors import UserError
from omnitrain.models.omni.encode import idle_prompt
from omnitrain.models.omni.flops import ModelFlops
from omnitrain.parallel.resolve import resolve_without_ranks
from omnitrain.recipe import ParallelPlan, Recipe
from omnitrain.recipe.yaml_text import with_node
from omnitrain.train.build_from_recipe import build_from_recipe, build_without_tokenizer, use_ops
from omnitrain.train.device import compute_dtype, mixed_precision
from omnitrain.train.epochs import loader_of
from omnitrain.train.metrics.display import quiet_libraries
from omnitrain.train.planning.devices import MEASURED, Device
from omnitrain.train.planning.rank_run import Training, predict_rank
from omnitrain.train.planning.search import Candidate, Planner, Search, steps_apart

_FASTER = 1.2  # a neighbour so many times as fast is worth a line of `check`
_MOST_RANKS = 2**14


@dataclass(frozen=True)
class Planned:
    """The layouts of a recipe on a number of devices.

    Attributes:
        num_ranks: one for each device.
        device: of each rank.
        best: the fastest that fit, each with the bytes of its fullest rank, counted in the real build.
        neighbours: of the best layout: its words -> why it is not the best.
        flops: that the model needs for a step.
        pack: what a pack is here, in words.
    """

    num_ranks: int
    device: Device
    best: tuple[tuple[Candidate, int], ...]
    neighbours: Mapping[str, str]
    flops: float
    pack: str

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the numbers of each layout: seconds, tokens per second of a device, shares, GiB."""
        for candidate, counted in self.best:
            yield _numbers(candidate, self) | {"peak": counted / 2**30}

    def as_json(self) -> dict[str, Any]:
        """Return all numbers."""
        return {
            "num_ranks": self.num_ranks,
            "device": {"name": self.device.name, "memory": self.device.memory, "source": self.device.source},
            "pack": self.pack,
            "layouts": list(self.rows()),
            "neighbours": dict(self.neighbours),
        }

    def __rich__(self) -> RenderableType:
        """The best layouts, where their time and memory go, and why neighbours of the best are not."""
        rows = list(self.rows())
        times = [("step", "tokens/s per GPU", "MFU", *(f"idle: {cause}" for cause in rows[0]["idle"]))]
        times += [
            (f"{row['seconds']:.3g} s", f"{row['tokens_per_second']:,.0f}", *map("{:.1%}".format, _shares(row)))
            for row in rows
        ]
        sizes = [("GiB of the fullest rank", *rows[0]["memory"])]
        sizes += [tuple(map("{:.3g}".format, (row["peak"], *row["memory"].values()))) for row in rows]
        names = [row["layout"] for row in rows]
        head = f"{self.num_ranks} x {self.device.name}, {self.device.memory / 2**30:.1f} GiB each; {self.pack}"
        lines = [f"not {words}: {why}" for words, why in self.neighbours.items()]
        return Group(head, "", _table(names, times), "", _table(names, sizes), "", *lines)


def _shares(row: Mapping[str, Any]) -> tuple[float, ...]:
    return row["mfu"], *row["idle"].values()


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table of layouts; the first row has the heads of columns."""
    heads = (Column(name, justify="right", no_wrap=True) for name in rows[0])
    table = Table(Column("layout", no_wrap=True), *heads, box=None, pad_edge=False)
    for name, row in zip(names, rows[1:], strict=True):
        table.add_row(name, *row)
    return table


def plan_recipe(recipe: Recipe, num_ranks: int, device: Device, *, top: int = 5) -> Planned:
    """Search the layouts of a recipe. No weights are read, and no ranks are started.

    Raises UserError: no layout fits, with the least number of devices (a power of two times this one) that would, or
    the recipe's own plan, its model and the number of ranks contradict each other.
    """
    _require_whole_nodes(num_ranks, device)
    what = _what_trains(recipe, device)
    found = _planner(what, recipe, num_ranks, device).search()
    if not found.fitting:
        raise UserError(_fits_nowhere(what, recipe, num_ranks, device, found))
    best = found.fitting[0]
    everything = (*found.fitting, *found.rejected, *found.refused)
    neighbours = {str(one): _why_not(one, best) for one in everything if steps_apart(one, best) == 1}
    counted = tuple((one, _counted(what.training, one, recipe, num_ranks)) for one in found.fitting[:top])
    return Planned(num_ranks, device, counted, neighbours, what.flops * recipe.train.packs_per_step, what.pack)


def check_plan(recipe: Recipe, num_ranks: int, device: Device) -> str:
    """Return a line about the recipe's own layout: its step and memory, whether it fits, and a faster neighbour."""
    _require_whole_nodes(num_ranks, device)
    what = _what_trains(recipe, device)
    planner = _planner(what, recipe, num_ranks, device)
    own = planner.judge(planner.own())
    if own.found is None:
        raise UserError(own.reason)
    numbers = _numbers(own, Planned(num_ranks, device, (), {}, what.flops * recipe.train.packs_per_step, what.pack))
    line = (
        f"{num_ranks} x {device.name}, {own}: a step takes {numbers['seconds']:.4g} s, "
        f"{numbers['tokens_per_second']:,.0f} tokens/s per GPU, MFU {numbers['mfu']:.1%}, "
        f"peak {numbers['peak']:.2f} GiB"
    )
    if own.reason:
        line += f"; it does not fit ({own.reason})"
    near = [planner.judge(one) for one in planner.candidates() if steps_apart(one, own) == 1]
    fitting = [one for one in near if one.found and not one.reason]
    fastest = min(fitting, key=lambda one: one.found.seconds, default=None)  # type: ignore[union-attr]
    if fastest is not None and fastest.found is not None:
        ratio = own.found.seconds / fastest.found.seconds
        if own.reason or ratio >= _FASTER:
            line += f"; {fastest} fits and takes {fastest.found.seconds:.4g} s ({ratio:.2f} times as fast)"
    return line


def apply_plan(recipe_file: str, plan: ParallelPlan) -> Path:
    """Write a plan as `parallel` into the file of a recipe; all other lines, and their comments, stay."""
    require_own_file(recipe_file)
    file = Path(recipe_file)
    tree = plan.model_dump(exclude_defaults=True, mode="json")
    file.write_text(with_node(file.read_text(encoding="utf-8"), "parallel", tree), encoding="utf-8")
    return file


def require_own_file(recipe: str) -> None:
    """Raise UserError if a recipe is shipped with omnitrain, so that nothing is written into it."""
    if not Path(recipe).is_file():
        raise UserError(f"--apply: `{recipe}` is shipped with omnitrain; copy it with `omnitrain cp {recipe} FILE`")


@dataclass(frozen=True)
class _What:
    training: Training
    flops: float  # that the model needs for the pack
    pack: str  # in words


def _what_trains(recipe: Recipe, device: Device) -> _What:
    """Build the model on the meta device, with a pack of the recipe's data, or of one sample if it cannot be read."""
    quiet_libraries()
    mixed = mixed_precision(recipe.train, "cpu" if device.name == MEASURED else "cuda")
    try:
        model, processor = build_from_recipe(recipe, "meta")
        (pack,), *_ = loader_of(recipe, model, processor, 1)
        words = f"packs like the first one of the data ({pack.input_ids.numel()} tokens)"
    except UserError as error:
        model = build_without_tokenizer(recipe)
        tokens = recipe.data.pack_tokens
        sample = replace(idle_prompt(model, tokens), loss_mask=np.ones(tokens, bool))
        pack = Pack.from_samples([sample])
        words = f"packs of one text of {tokens} tokens, as the data cannot be read ({error.problems[0]})"
    counter, model = ModelFlops(model), model.train()
    use_ops(model, recipe.model.ops, torch.device("cpu"), compute_dtype(recipe.parallel, mixed))
    flops = counter.of_pack(pack)
    for name, media in (*pack.inputs.items(), *pack.targets.items()):
        for group in media.groups:
            flops.add_all(counter.of_media(name, group))
    return _What(Training(model, recipe.train.optimizer, mixed, pack), flops.passes.model.total, words)


def _require_whole_nodes(num_ranks: int, device: Device) -> None:
    if num_ranks > device.per_node and num_ranks % device.per_node:
        raise UserError(
            f"--gpus {num_ranks}: found nodes of {device.per_node} devices; expected a multiple of {device.per_node}, "
            "or set --gpus-per-node"
        )


def _planner(what: _What, recipe: Recipe, num_ranks: int, device: Device) -> Planner:
    return Planner(what.training, recipe.parallel, device, num_ranks, recipe.train.packs_per_step)


def _numbers(candidate: Candidate, planned: Planned) -> dict[str, Any]:
    found = candidate.found
    assert found is not None
    possible = found.seconds * planned.num_ranks * planned.device.flops
    return {
        "layout": str(candidate),
        "parallel": candidate.plan.model_dump(exclude_defaults=True, mode="json"),
        "seconds": found.seconds,
        "tokens_per_second": found.tokens / found.seconds / planned.num_ranks,
        "mfu": planned.flops / possible,
        "idle": found.idle,
        "peak": found.peak / 2**30,
        "memory": {cause: size / 2**30 for cause, size in found.memory.items()},
    }


def _why_not(candidate: Candidate, best: Candidate) -> str:
    """Why a neighbour of the best layout is not the best, in words."""
    if candidate.found is None or best.found is None or candidate.reason:
        return candidate.reason
    slower = candidate.found.seconds / best.found.seconds
    more = {cause: share - best.found.idle[cause] for cause, share in candidate.found.idle.items()}
    cause = max(more, key=lambda name: more[name], default="")
    because = f", {cause} take {candidate.found.idle[cause]:.1%} of the step" if cause and more[cause] > 0.01 else ""
    return f"{slower:.2f} times as long{because}"


def _counted(training: Training, candidate: Candidate, recipe: Recipe, num_ranks: int) -> int:
    """Bytes of the fullest rank of a layout, counted in the real build, on the first and the last pipeline stage."""
    state, _ = resolve_without_ranks(training.model, candidate.plan, training.mixed_precision, num_ranks)
    number = recipe.train.packs_per_step // state.size("dp")
    at_once = min(number, 2 * state.size("pp"))  # with more micro-batches no more are alive
    ends = sorted({0, num_ranks - 1} if state.size("pp") > 1 else {0})
    return max(predict_rank(training, candidate.plan, num_ranks, at_once, rank).peak for rank in ends)


def _fits_nowhere(what: _What, recipe: Recipe, num_ranks: int, device: Device, found: Search) -> str:
    """Why no layout fits; if memory binds, the least number of devices that would do."""
    if not found.rejected:
        reasons = sorted({one.reason for one in found.refused})
        return f"no layout of {num_ranks} devices is possible: {'; '.join(reasons[:3])}"
    smallest = min(found.rejected, key=lambda one: one.found.peak)  # type: ignore[union-attr]
    words = f"no layout fits {num_ranks} x {device.name}; the smallest, {smallest}, needs {smallest.reason}"
    more = num_ranks
    while (more := 2 * more) <= _MOST_RANKS:
        whole = recipe.model_copy(update={"train": recipe.train.model_copy(update={"packs_per_step": more})})
        if _planner(what, whole, more, device).search().fitting:
            return f"{words}; {more} would do (with train.packs_per_step {more})"
    return f"{words}; no number up to {_MOST_RANKS} would do: use devices with more memory, or shorter packs"

"""``omnitrain plan``: the best layouts of a recipe on devices that need not be here, and why others are not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Column, Table

from omnitrain.data.packing.pack import Pack
from omnitrain.errors import RecipeError, UserError
from omnitrain.models.omni.flops import ModelFlops
from omnitrain.parallel.resolve import resolve_without_ranks
from omnitrain.parallel.step.plan import facts_of
from omnitrain.plan.tables import MicroBatchFacts
from omnitrain.recipe import ParallelPlan, Recipe
from omnitrain.recipe.yaml_text import with_node
from omnitrain.train.build_from_recipe import build_from_recipe, build_without_tokenizer, use_ops
from omnitrain.train.device import compute_dtype, mixed_precision, use_device
from omnitrain.train.epochs import in_steps, loader_of
from omnitrain.train.metrics.console import console
from omnitrain.train.metrics.display import quiet_libraries
from omnitrain.train.planning.devices import MEASURED, Device, device_here
from omnitrain.train.planning.rank_run import Training
from omnitrain.train.planning.search import Candidate, Planner, Search, steps_apart, text_pack
from omnitrain.train.run_state.run_folder import RunFolder

_FASTER = 1.2  # a neighbour so many times as fast is worth a line of `check`
_MOST_RANKS = 2**14
_PACKS = 8  # first packs of the data, which a step has in turn


@dataclass(frozen=True)
class Planned:
    """The layouts of a recipe on a number of devices.

    Attributes:
        num_ranks: one for each device.
        device: of each rank.
        best: the fastest that fit, in the real build.
        neighbours: of the best layout: its words -> why it is not the best.
        flops: that the model needs for a step.
        pack: what a pack is here, in words.
    """

    num_ranks: int
    device: Device
    best: tuple[Candidate, ...]
    neighbours: Mapping[str, str]
    flops: float
    pack: str

    def as_json(self) -> dict[str, Any]:
        """Return all numbers; of a layout: seconds, tokens per second of a device, shares, GiB."""
        return {
            "num_ranks": self.num_ranks,
            "device": {"name": self.device.name, "memory": self.device.memory, "source": self.device.source},
            "pack": self.pack,
            "flops": self.flops,
            "layouts": [_numbers(candidate, self) for candidate in self.best],
            "neighbours": dict(self.neighbours),
        }

    def __rich__(self) -> RenderableType:
        """See :func:`shown`."""
        return shown(self.as_json())


def shown(planned: Mapping[str, Any]) -> RenderableType:
    """Show layouts as JSON has them: where their time and memory go, and why neighbours of the best are not."""
    rows = planned["layouts"]
    layouts = Table(*_columns("layout"), *_columns("step", "tokens/s", "MFU", "GiB", is_number=True), **_PLAIN)
    shares = Table(*_columns("idle, of a step"), *_columns(*rows[0]["idle"], is_number=True), **_PLAIN)
    sizes = Table(*_columns("GiB"), *_columns(*rows[0]["memory"], is_number=True), **_PLAIN)
    for number, row in enumerate(rows, start=1):
        rate = f"{row['tokens_per_second']:,.0f}"
        times = (f"{row['seconds']:.3g} s", rate, f"{row['mfu']:.1%}", f"{row['peak']:.3g}")
        layouts.add_row(f"{number}  {row['layout']}", *times)
        shares.add_row(str(number), *map("{:.1%}".format, row["idle"].values()))
        sizes.add_row(str(number), *map("{:.3g}".format, row["memory"].values()))
    device = planned["device"]
    head = f"{planned['num_ranks']} x {device['name']}, {device['memory'] / 2**30:.3g} GiB each; {planned['pack']}"
    note = "tokens/s: of a GPU; GiB: of the fullest rank"
    lines = [f"not {words}: {why}" for words, why in planned["neighbours"].items()]
    return Group(head, note, "", layouts, "", shares, "", sizes, "", *lines)


_PLAIN: Mapping[str, Any] = {"box": None, "pad_edge": False}


def _columns(*names: str, is_number: bool = False) -> Iterator[Column]:
    yield from (Column(name, justify="right" if is_number else "left", no_wrap=True) for name in names)


def plan_recipe(recipe: Recipe, num_ranks: int, device: Device, *, top: int = 5) -> Planned:
    """Search the layouts of a recipe. No weights are read, and no ranks are started.

    Raises UserError: no layout fits, with the least number of devices (a power of two times this one) that would, or
    the recipe's own plan, its model and the number of ranks contradict each other.
    """
    _require_whole_nodes("--gpus", num_ranks, device)
    what, device = _what_trains(recipe, device), device.shared_by(num_ranks)
    planner = _planner(what, recipe, num_ranks, device)
    found = planner.search(top, is_counted=True)
    if not found.fitting:
        raise UserError(_fits_nowhere(planner, num_ranks, what.packs_per_step, device, found))
    best = found.fitting[0]
    everything = (*found.fitting, *found.rejected, *found.refused, *found.slower)
    neighbours = {str(one): _why_not(one, best) for one in everything if steps_apart(one, best) == 1}
    return Planned(num_ranks, device, tuple(found.fitting[:top]), neighbours, what.flops, what.pack)


def check_plan(recipe: Recipe, num_ranks: int | None, device: Device) -> str:
    """Return a line about the recipe's own layout: its step and memory, whether it fits, and a faster neighbour.

    ``num_ranks`` None: a number that the plan fits.
    """
    what = _what_trains(recipe, device)
    state, _ = resolve_without_ranks(what.training.model, recipe.parallel, what.training.mixed_precision, num_ranks)
    num_ranks, device = state.num_ranks, device.shared_by(state.num_ranks)
    _require_whole_nodes("--nproc", num_ranks, device)
    planner = _planner(what, recipe, num_ranks, device)
    own = planner.judge(planner.own())
    if own.found is None:
        raise UserError(own.reason)
    own = planner.counted(own)
    numbers = _numbers(own, Planned(num_ranks, device, (), {}, what.flops, what.pack))
    line = (
        f"{num_ranks} x {device.name}, {own}: a step takes {numbers['seconds']:.4g} s, "
        f"{numbers['tokens_per_second']:,.0f} tokens/s per GPU, MFU {numbers['mfu']:.1%}, "
        f"peak {numbers['peak']:.2f} GiB"
    )
    if own.reason:
        line += f"; it does not fit ({own.reason})"
    near = map(planner.judge, (one for one in planner.candidates() if steps_apart(one, own) == 1))
    least = 0.0 if own.reason else _FASTER
    better = [one for one in near if not one.reason and own.seconds >= least * one.seconds]
    counted = map(planner.counted, sorted(better, key=lambda one: one.seconds))
    if (best := next((one for one in counted if not one.reason), None)) is not None:
        line += f"; {best} fits and takes {best.seconds:.4g} s ({own.seconds / best.seconds:.2f} times as fast)"
    return line


def with_layout(recipe: Recipe, num_ranks: int, *, continues: bool) -> Recipe:
    """Return a recipe with the best layout on ``num_ranks`` devices of this machine in place of `parallel: auto`.

    ``continues``: with the layout of its run's folder, if that has a checkpoint. Errors as of :func:`plan_recipe`.
    """
    folder = RunFolder(recipe)
    if continues and folder.has_checkpoint:
        plan, words = Recipe.load(str(folder.path / "recipe.yaml")).parallel, f"as {folder.path} has it"
    else:
        (best,) = plan_recipe(recipe, num_ranks, device_here(use_device(recipe.train).type), top=1).best
        plan, words = best.plan, f"{best}, about {best.seconds:.2g} s a step and {best.peak / 2**30:.2g} GiB"
    console.print(f"parallel.auto: the layout is {words}", soft_wrap=True)
    return recipe.model_copy(update={"parallel": plan})


def apply_plan(recipe_file: str, plan: ParallelPlan) -> Path:
    """Write a plan as `parallel` into the file of a recipe; all other lines, and their comments, stay."""
    require_own_file(recipe_file)
    file = Path(recipe_file)
    tree = plan.model_dump(exclude_defaults=True, mode="json")
    file.write_bytes(with_node(file.read_bytes().decode(), "parallel", tree).encode())  # with the ends of its lines
    return file


def require_own_file(recipe: str) -> None:
    """Raise UserError if no plan can be written into a recipe: it is shipped with omnitrain, or no block YAML."""
    if not Path(recipe).is_file():
        raise UserError(f"--apply: `{recipe}` is shipped with omnitrain; copy it with `omnitrain cp {recipe} FILE`")
    try:
        with_node(Path(recipe).read_text(encoding="utf-8"), "parallel", {})
    except RecipeError as error:
        raise UserError(f"--apply: {recipe}: {error}") from None


@dataclass(frozen=True)
class _What:
    training: Training
    drawn: Sequence[MicroBatchFacts]  # packs that steps have in turn
    packs_per_step: int
    flops: float  # that the model needs for a step
    pack: str  # in words


def _what_trains(recipe: Recipe, device: Device) -> _What:
    """Build the model on the meta device, with the first packs of the data, or of one text if they cannot be read."""
    quiet_libraries()
    mixed = mixed_precision(recipe.train, "cpu" if device.name == MEASURED else "cuda")
    try:
        packs_per_step = in_steps(recipe).train.packs_per_step
        model, processor = build_from_recipe(recipe, "meta")
        packs = [pack for (pack,) in islice(loader_of(recipe, model, processor, 1), _PACKS)]
        words = f"packs like the first {len(packs)} of the data ({fmean(map(_tokens, packs)):,.0f} tokens)"
    except UserError as error:
        packs_per_step = recipe.train.samples_per_step or recipe.train.packs_per_step
        model, tokens = build_without_tokenizer(recipe), recipe.data.pack_tokens
        packs = [text_pack(model, [tokens])]
        words = f"packs of one text of {tokens} tokens, as the data cannot be read ({error.problems[0]})"
    counter, model = ModelFlops(model), model.train()
    use_ops(model, recipe.model.ops, torch.device("cpu"), compute_dtype(recipe.parallel, mixed))
    training = Training(model, recipe.train.optimizer, mixed, max(packs, key=_tokens))
    drawn = [facts_of(pack, model.runner.apart) for pack in packs]
    flops = packs_per_step * fmean(_flops(counter, pack) for pack in packs)
    return _What(training, drawn, packs_per_step, flops, words)


def _tokens(pack: Pack) -> int:
    return int(pack.input_ids.numel())


def _flops(counter: ModelFlops, pack: Pack) -> float:
    """That the model needs for a pack."""
    flops = counter.of_pack(pack)
    for name, media in (*pack.inputs.items(), *pack.targets.items()):
        for group in media.groups:
            flops.add_all(counter.of_media(name, group))
    return flops.passes.model.total


def _require_whole_nodes(option: str, num_ranks: int, device: Device) -> None:
    if num_ranks > device.per_node and num_ranks % device.per_node:
        raise UserError(
            f"{option} {num_ranks}: found nodes of {device.per_node} devices; expected a multiple of "
            f"{device.per_node}{', or set --gpus-per-node' if option == '--gpus' else ''}"
        )


def _planner(what: _What, recipe: Recipe, num_ranks: int, device: Device) -> Planner:
    return Planner(what.training, recipe.parallel, device, num_ranks, what.packs_per_step, what.drawn)


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
        "peak": candidate.peak / 2**30,
        "memory": {cause: size / 2**30 for cause, size in found.memory.items()},
    }


def _why_not(candidate: Candidate, best: Candidate) -> str:
    """Why a neighbour of the best layout is not the best, in words."""
    if candidate.found is None or best.found is None or candidate.reason:
        return candidate.reason
    slower = candidate.seconds / best.seconds
    more = {cause: share - best.found.idle[cause] for cause, share in candidate.found.idle.items()}
    cause = max(more, key=lambda name: more[name], default="")
    because = f", {cause} take {candidate.found.idle[cause]:.1%} of the step" if cause and more[cause] > 0.01 else ""
    return f"{slower:.2f} times as long{because}"


def _fits_nowhere(planner: Planner, num_ranks: int, packs_per_step: int, device: Device, found: Search) -> str:
    """Why no layout fits; if memory binds, the least number of devices that would do."""
    if not found.rejected:
        reasons = Counter(one.reason for one in found.refused).most_common(3)
        return f"no layout of {num_ranks} devices is possible: {'; '.join(reason for reason, _ in reasons)}"
    smallest = min(found.rejected, key=lambda one: one.peak)
    words = f"no layout fits {num_ranks} x {device.name}; the smallest, {smallest}, needs {smallest.reason}"
    most = num_ranks if device.name == MEASURED else _MOST_RANKS  # ranks share the one CPU
    more = num_ranks
    while (more := 2 * more) <= most:
        packs = -(-packs_per_step // more) * more
        if planner.on(more, packs).search().fitting:
            return f"{words}; {more} would do (with train.packs_per_step {packs})"
    return f"{words}; no number up to {most} would do: use devices with more memory, or shorter packs"

"""The recipe: one typed tree for YAML files, ``key.sub=value`` overrides and Python.

Every field has a description; ``omnitrain show --schema`` prints them as JSON schema. Unknown keys are errors
(:mod:`omnitrain.recipe.problems` names the nearest valid one).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError

from omnitrain.errors import RecipeError, problem_list
from omnitrain.recipe.data import VISUAL_KEYS, Data, source_names
from omnitrain.recipe.functions import import_plugin
from omnitrain.recipe.model import Model, TeacherSource
from omnitrain.recipe.parallel import FOUNDATION, MAIN, ComponentPlan, ParallelPlan, PlanOrAuto
from omnitrain.recipe.problems import problem_lines
from omnitrain.recipe.strict import Idle, Problem, Strict
from omnitrain.recipe.suggest import hint, nearest
from omnitrain.recipe.train import Evaluation, Train
from omnitrain.recipe.yaml_text import dump_yaml, parse_yaml


class Recipe(Strict):
    """Everything that a run needs. Every run saves its resolved recipe, which can be run again as it is."""

    # Must be the first field, so that plugins are imported before other fields are validated: they add model types.
    plugins: list[Annotated[str, AfterValidator(import_plugin)]] = Field(default_factory=list)
    """Your own modules (`MODULE` or `FILE.py`) that register classes; imported before the rest of the recipe."""
    output_dir: str = "runs/default"
    """Folder of the run: recipe, metrics, checkpoints, evaluation."""
    model: Model
    """The omni model."""
    data: Data
    """Data sets and packing."""
    train: Train = Field(default_factory=Train)
    """The training loop."""
    parallel: PlanOrAuto = Field(default_factory=ParallelPlan)
    """How the components are distributed over ranks."""
    evaluation: Evaluation | None = None
    """Evaluation at the end of the run. Unset: none."""

    def idle(self) -> Iterator[Idle]:
        """Yield the keys that a different node makes idle."""
        if self.evaluation is None:
            yield Idle("data.heldout", "but nothing is evaluated; add `evaluation: {}`, or remove it")
        if self.parallel.default.precision.compute is not None:
            why = "but `parallel.default.precision.compute` sets it for all components; remove one of the two"
            yield Idle("train.precision", why)
        for name in self.parallel.sections if not self.data.workers else ():
            why = "but with `data.workers: 0` a step is planned when it begins, not before; set data.workers above 0"
            yield Idle(f"parallel.sections.{name}.ahead", f"{why}, or remove it")
        if not (self._compared or "text" in self.train.losses or self.train.metrics):
            why = "but there is no `train.losses.text` or `train.metrics` to read its hidden states"
            yield Idle("model.teachers", f"{why}; set its `divergence`, add a function, or remove it")
        for name in self.model.teachers.keys() & self.data.pack_elements.keys():
            yield Idle("data.pack_elements", f"but the teacher {name} reads no media; remove it there")
        if self.data.processor is not None:
            yield Idle("model.tokenizer", "but `data.processor` contains a tokenizer; remove one of the two")
        if self.model.checkpoint is not None:
            why = "but `model.checkpoint` contains its HF processor; remove it"
            for key in ("processor", "processor_arguments", "audio_in_video"):
                yield Idle(f"data.{key}", why)
            for key in VISUAL_KEYS:
                yield Idle(f"data.{key}", f"{why}, or set it for each data set")

    def contradictions(self) -> Iterator[Problem]:
        """Yield the settings of one node that another node makes impossible."""
        if self.model.checkpoint is None:
            yield from self.unknown_heads(self.model.decoders)
        yield from self._unknown_sources()
        if self.evaluation is not None and not self.data.heldout:
            yield (), "`evaluation` needs `data.heldout`: add the held-out data, or remove `evaluation`"
        if self.evaluation is not None and self.evaluation.ema and self.train.ema is None:
            yield (), "`evaluation.ema` needs `train.ema`, which keeps the averages: add it, or remove `evaluation.ema`"
        for found in (self._unmeasured_best(), self._unmeasured_stop(), self._uncompiled()):
            yield from (((), message) for message in found)

    def _unknown_sources(self) -> Iterator[Problem]:
        known = source_names([*self.data.train, *self.data.heldout])
        for name, teacher in self.model.teachers.items():
            for source in teacher.sources or ():
                if source not in known:
                    yield ("model", "teachers", name, "sources"), f"unknown data set {source!r}; {hint(source, known)}"

    def _unmeasured_best(self) -> Iterator[str]:
        train, measured, best = self.train, self._heldout_every, self.train.save.keep_best
        if best is None:
            return
        is_heldout, every = best.startswith("heldout."), train.save.every
        if is_heldout and measured is None:
            yield (
                f"`train.save.keep_best: {best}` needs `evaluation.loss_every`: set it, or use a loss of the "
                "training data, such as `loss`"
            )
        elif isinstance(every, int) and not self.measures_best(every):
            key, period = ("evaluation.loss_every", measured) if is_heldout else ("train.log_every", train.log_every)
            yield (
                f"`train.save.keep_best: {best}` is measured every {period} steps (`{key}`), but checkpoints are "
                f"saved every {every} steps (`train.save.every`); set it to a multiple of {period}"
            )

    def _unmeasured_stop(self) -> Iterator[str]:
        metric = self.train.early_stopping.metric if self.train.early_stopping else ""
        every = {"heldout": self._heldout_every, "scores": self.evaluation and self.evaluation.every}
        kind = metric.split(".")[0]
        if kind in every and every[kind] is None:
            key = "evaluation.every" if kind == "scores" else "evaluation.loss_every"
            yield (
                f"`train.early_stopping.metric: {metric}` needs `{key}`: set it, or use a metric of the training data, "
                "such as `loss`"
            )
        _, is_own, own = metric.partition("metrics.")
        if is_own and (name := own.split(".")[0]) not in self.train.metrics:
            known = f"`train.metrics` has no {name!r}; {hint(name, self.train.metrics)}"
            yield f"`train.early_stopping.metric: {metric}`: {known}"

    def _uncompiled(self) -> Iterator[str]:
        plan = self.parallel.of(FOUNDATION) if self.train.compile.enabled is True else ComponentPlan()
        if plan.memory.offloads("activations") and not plan.memory.recomputes_blocks:
            yield (
                "`train.compile` with `memory.offload: [activations]` of the foundation: compiled blocks cannot "
                "offload activations without recompute yet; add `memory.recompute: full`, or use one of the two"
            )
        elif plan.compile is not None:
            said = f"`compile: {str(plan.compile).lower()}`"
            yield f"`train.compile` is set, and the foundation's plan says {said}; set it in one place"

    @property
    def _heldout_every(self) -> int | None:
        """Steps between two held-out losses; None: only at the end."""
        return None if self.evaluation is None else self.evaluation.loss_every or self.evaluation.every

    def advice(self) -> Iterator[str]:
        """Yield settings that are no mistake, but probably not meant."""
        warmup, steps = self.train.optimizer.warmup_steps, self.train.steps
        if warmup > steps and self.train.epochs is None:
            yield (
                f"train.optimizer.warmup_steps is {warmup}, but the run has {steps} step{'s' * (steps > 1)}: the "
                f"learning rate only reaches {steps / warmup:.0%} of its peak; set it to {steps // 10}, or raise "
                "train.steps"
            )

    def measures_heldout_loss(self, step: int) -> bool:
        """Return whether to measure the held-out loss after optimizer step ``step``, from 1."""
        every = self.evaluation.loss_every if self.evaluation else None
        return self.evaluates(step) or (every is not None and step % every == 0)

    def evaluates(self, step: int) -> bool:
        """Return whether to generate and score answers after optimizer step ``step``, from 1, while the run goes on."""
        every = self.evaluation.every if self.evaluation else None
        return every is not None and step % every == 0

    def writes_metrics(self, step: int) -> bool:
        """Return whether step ``step``, from 1, writes a line to ``metrics.jsonl``."""
        return step % self.train.log_every == 0 or step == self.train.steps or self.measures_heldout_loss(step)

    def measures_best(self, step: int) -> bool:
        """Return whether the line of step ``step``, from 1, has ``train.save.keep_best``; without that key, True."""
        if self.train.save.keep_best is None:
            return True
        is_heldout = self.train.save.keep_best.startswith("heldout.")
        return self.measures_heldout_loss(step) if is_heldout else self.writes_metrics(step)

    @property
    def loss_weights(self) -> dict[str, float]:
        """Head, or teacher with a divergence -> weight of its loss; 1 without an entry."""
        return self.train.loss_weights | {name: teacher.weight for name, teacher in self._compared.items()}

    @property
    def _compared(self) -> dict[str, TeacherSource]:
        return {name: teacher for name, teacher in self.model.teachers.items() if teacher.divergence is not None}

    def unknown_heads(self, decoders: Iterable[str]) -> Iterator[Problem]:
        """Yield the keys that name another head than ``text`` and ``decoders``, with the nearest one."""
        heads = {"text", *decoders}
        sampling, stopping = self.evaluation.sampling if self.evaluation else {}, self.train.early_stopping
        for *path, named in (
            ("train", "loss_weights", self.train.loss_weights),
            ("train", "losses", self.train.losses),
            ("evaluation", "sampling", sampling),
        ):
            yield from (((*path, name), f"unknown name; {hint(name, heads)}") for name in named if name not in heads)
        for path, metric in (
            (["train", "save", "keep_best"], self.train.save.keep_best),
            (["train", "early_stopping", "metric"], stopping and stopping.metric),
        ):
            if metric and (head := _head_of(metric)) not in {None, *heads, *self._compared}:
                yield tuple(path), f"unknown head; {hint(str(head), {*heads, *self._compared})}"

    @classmethod
    def load(cls, path: str | Path, overrides: list[str] | None = None) -> Recipe:
        """Load a YAML file, or a shipped recipe by its name (``quickstart``), with ``overrides`` in order.

        An override is ``key.sub=value``; values are YAML. Raises RecipeError: no such recipe, or invalid YAML, or
        problems in the tree or the overrides; lists all of them with their paths and, for unknown keys, the nearest
        valid key. A value `tasks/...` that is no file here is the file that omnitrain ships.
        """
        if not isinstance(overrides, list | tuple | None):
            raise RecipeError(
                f"overrides: found a {type(overrides).__name__}; expected a list of key.sub=value, such as "
                "['train.steps=20']"
            )
        file = find_recipe(path)
        tree = _read_mapping(file)
        problems = apply_overrides(tree, overrides or [])
        try:
            recipe = cls.model_validate(_with_shipped_files(tree))
        except ValidationError as error:
            problems += problem_lines(error, cls)
        if problems:
            raise RecipeError(problem_list(str(file), problems))
        return recipe


def _head_of(metric: str) -> str | None:
    """Return the head of ``heads.HEAD.loss`` or ``metrics.NAME.HEAD``; None: the metric is of all heads."""
    parts = metric.removeprefix("heldout.").split(".")
    return {"heads": parts[1:2], "metrics": parts[2:3]}.get(parts[0], [None])[0]


def _read_mapping(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{file}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    tree = parse_yaml(text, str(file))
    if not isinstance(tree, dict):
        found = "an empty file" if tree is None else f"a {type(tree).__name__}"
        raise RecipeError(f"{file}: found {found}; expected keys such as `model:`, `data:` and `train:`")
    return tree


def _with_shipped_files(node: Any) -> Any:
    """Return the tree in which a ``tasks/...`` that the working folder lacks is the shipped file."""
    if isinstance(node, dict):
        return {key: _with_shipped_files(value) for key, value in node.items()}
    if isinstance(node, list):
        return [*map(_with_shipped_files, node)]
    if not isinstance(node, str) or not node.startswith("tasks/"):
        return node
    file, shipped = node.partition(":")[0], recipes_folder().parent
    return str(shipped / node) if (shipped / file).exists() and not Path(file).exists() else node


def apply_overrides(tree: dict[str, Any], overrides: list[str]) -> list[str]:
    """Set ``key.sub=value`` (YAML) in ``tree``, in order; return a line for each that cannot be applied."""
    problems = []
    for override in overrides:
        try:
            _apply(tree, override)
        except RecipeError as error:
            problems.append(str(error))
    return problems


def _apply(tree: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    path = dotted.strip().split(".")
    if not equals or not all(path):
        raise RecipeError(f"override `{override}`: expected key.sub=value, such as train.steps=20")
    value = parse_yaml(text, f"override `{override}`")
    node: Any = tree
    for depth, part in enumerate(path[:-1]):
        node = _child(node, _key(node, part, path[:depth]), path[depth + 1])
    node[_key(node, path[-1], path[:-1])] = value


def _child(node: Any, key: str | int, next_part: str) -> Any:
    child = node.get(key) if isinstance(node, dict) else node[key]
    if child is not None:
        return child
    if next_part.isdigit() and next_part != "0":
        return []  # a list that nobody wrote has no such index; its first one makes it
    node[key] = [None] if next_part == "0" else {}
    return node[key]


def _key(node: Any, part: str, parents: list[str]) -> str | int:
    if isinstance(node, dict):
        return part
    dotted = ".".join(parents)
    if not isinstance(node, list):
        raise RecipeError(f"{dotted}.{part}: `{dotted}` is {node!r}, which has no keys; set `{dotted}` as a whole")
    if part.isdigit() and int(part) < len(node):
        return int(part)
    indexes = f"an index from 0 to {len(node) - 1}" if node else "no index, the list is empty"
    raise RecipeError(f"{dotted}.{part}: found `{part}`; expected {indexes}; or set `{dotted}` as a whole")


def require_heads(recipe: Recipe, decoders: Iterable[str]) -> None:
    """Raise a RecipeError for heads that a recipe names and its model does not have, or that its answers would need."""
    problems = [f"{'.'.join(map(str, path))}: {why}" for path, why in recipe.unknown_heads(decoders)]
    apart = [name for name in decoders if recipe.parallel.section_of(name) != MAIN]
    if recipe.evaluation is not None and apart:
        problems.append(
            f"evaluation: it generates answers, whose tokens are drawn beside the foundation, but {apart[0]} is in "
            f"section {recipe.parallel.section_of(apart[0])}; remove `evaluation`, or the section"
        )
    if problems:
        raise RecipeError(*problems)


def save_recipe(recipe: Recipe, path: str | Path) -> None:
    """Write a resolved recipe as YAML with all fields, atomically; the file loads to an equal recipe."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.tmp")
    temporary.write_text(dump_yaml(recipe.model_dump()), encoding="utf-8")
    os.replace(temporary, file)


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a recipe (draft 2020-12), for completion and checks in editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Recipe.model_json_schema()}


_PACKAGE = Path(__file__).parents[1]


def recipes_folder() -> Path:
    """Return the folder of the shipped recipes."""
    installed = _PACKAGE / "recipes"
    return installed if installed.is_dir() else _PACKAGE.parent / "recipes"


def list_recipes() -> dict[str, Path]:
    """Return the shipped recipes: name -> file, sorted by name."""
    return {path.stem: path for path in sorted(recipes_folder().glob("*.yaml"))}


def summary(path: Path) -> str:
    """Return the first comment line of a recipe without its ``#``, or an empty string."""
    comments = (line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#"))
    return next(comments, "").lstrip("#").strip()


def find_recipe(path: str | Path) -> Path:
    """Return the file of a recipe, named by a file or as shipped; RecipeError: there is none; where it was searched."""
    if Path(path).is_file():
        return Path(path)
    shipped = list_recipes()
    if str(path) in shipped:
        return shipped[str(path)]
    if (saved := Path(path, "recipe.yaml")).is_file():
        raise RecipeError(
            f"{path} is the folder of a run, and no recipe: `omnitrain run {path}` continues the run, and "
            f"`omnitrain run {saved} output_dir=NEW` starts another with its recipe"
        )
    beside = nearest(Path(path).name, (file.name for file in Path(path).parent.glob("*.y*ml")))
    if beside is not None:
        advice = f"did you mean `{Path(path).parent / beside}`?"
    else:
        advice = hint(Path(path).stem, shipped) if shipped else "that folder contains no recipe"
    raise RecipeError(
        f"no recipe `{path}`: looked for the file {Path(path).absolute()} and for a shipped recipe with that name in "
        f"{recipes_folder()}; {advice}"
    )


def copy_recipe(name: str, destination: str | Path, *, force: bool = False) -> Path:
    """Copy a shipped recipe, or a file, to a file or into a folder, so that a user can edit it; return the new file.

    Raises RecipeError: no such recipe or folder, or the file exists (without ``force``), or cannot be written.
    """
    source = find_recipe(name)
    target = Path(destination)
    if target.is_dir():
        target = target / source.name
    if not target.parent.is_dir():
        raise RecipeError(f"no folder {target.parent} to copy `{name}` into; create it first")
    if target.exists() and not force:
        raise RecipeError(f"{target} exists; choose another name, or overwrite it with --force")
    if target.exists() and target.samefile(source):
        raise RecipeError(f"{target} is `{name}` itself; choose another destination")
    try:
        shutil.copyfile(source, target)
    except OSError as error:
        raise RecipeError(f"{target} cannot be written: {error.strerror}; choose another destination") from None
    return target

"""``omnitrain check``: validate a recipe in seconds, without loading weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from omnitrain.checkpoint.store import newest_checkpoint
from omnitrain.data.loading.loader import first_samples, require_usable
from omnitrain.data.packing.budget import PackBudget
from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Rejected, Sample
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.render.unread import require_shown
from omnitrain.data.sources.rows import RowSource, open_sources
from omnitrain.errors import UserError
from omnitrain.models.hf.compute_dtype import stays_fp32
from omnitrain.models.hf.load import (
    config_at,
    foundation_class,
    foundation_config,
    load_strictly,
    model_class,
    untie_as_in_files,
)
from omnitrain.models.omni.build import build_omni_model, omni_config_at
from omnitrain.models.omni.encode import with_all_inputs
from omnitrain.models.omni.model import OmniModel
from omnitrain.models.omni.named_parameters import freeze
from omnitrain.models.omni.summary import component_rows
from omnitrain.optim.adamw import require_fp32, trained_parameters
from omnitrain.optim.low_bit import require_state_format
from omnitrain.parallel.expert.load_balance import RouterMonitor
from omnitrain.parallel.expert.routing_record import RoutingOfRun
from omnitrain.parallel.fsdp.units import find_units, unit_names
from omnitrain.parallel.layout import planned_table, section_text
from omnitrain.parallel.resolve import dtype_of, resolve_without_ranks
from omnitrain.parallel.verify.coverage import coverage_of
from omnitrain.peers import SINGLE_PROCESS
from omnitrain.recipe import ComponentPlan, Model, ParallelPlan, Recipe
from omnitrain.recipe.component_configs import OmniConfig
from omnitrain.recipe.parallel import PlanError
from omnitrain.recipe.tree import require_heads
from omnitrain.torch_private import NEED_CONTENT, FakeTensorMode
from omnitrain.train.build_from_recipe import build_from_recipe, build_without_tokenizer, require_ops, use_own_functions
from omnitrain.train.callbacks import Callbacks, load_callbacks
from omnitrain.train.device import compute_dtype, machines_for, mixed_precision, require_devices, use_device
from omnitrain.train.epochs import counts_samples, in_steps
from omnitrain.train.evaluate.evaluate import load_scorer
from omnitrain.train.launch.environment import world_size
from omnitrain.train.lr_groups import decays_of, matrices_of, peaks_of
from omnitrain.train.metrics.console import console
from omnitrain.train.metrics.display import (
    quiet_libraries,
    show_components,
    show_contract,
    show_coverage,
    show_own_head,
    show_unused,
)
from omnitrain.train.metrics.trackers import require_trackers
from omnitrain.train.micro_batches import check_micro_batches
from omnitrain.train.prepare import show_unread, spared
from omnitrain.train.run_state.run_folder import RunFolder
from omnitrain.train.useless_keys import require_effect


def check_recipe(recipe: Recipe, num_ranks: int | None = None, *, one_machine: bool = False) -> list[str]:
    """Build the model without weights, open the data, prepare one row of every source, and return messages of problems.

    Weight files are compared with the model by name and shape. Every component runs once, on tensors without content.
    ``num_ranks`` None: a number that the plan fits. ``one_machine``: more ranks than devices are a problem.
    """
    quiet_libraries()
    problems = _Problems()
    built = problems.attempt(lambda: build_from_recipe(recipe, init_device="meta"))
    if built is not None and counts_samples(recipe):
        recipe = _counted_in_steps(recipe, problems)
    runs = _check_model(recipe, built and built[0], built and built[1], num_ranks, problems, one_machine)
    opened: dict[str, list[RowSource]] = {}
    for kind, sources in (("train", recipe.data.train), ("heldout", recipe.data.heldout)):
        opened[kind] = problems.attempt(functools.partial(open_sources, sources)) or []
        if runs:
            of_train = kind == "train"
            cut = of_train and built[0].runner.contract.without_tails
            elements = recipe.data.pack_elements if of_train else {}
            overlong = recipe.data.overlong_of_sources() if of_train else None
            limits = functools.partial(PackBudget, recipe.data.pack_tokens, elements, built[0].media_names)
            if (budget := problems.attempt(limits)) is not None:
                firsts = first_samples(
                    opened[kind], built[1], budget, overlong, without_tails=cut, may_ask=not of_train
                )
                problems += _check_rows(kind, firsts, built[0].teachers)
            problems.attempt(functools.partial(require_usable, opened[kind], built[1]))
    if runs and opened["train"]:
        problems.attempt(lambda: require_shown(opened["train"], opened["heldout"], built[1], spared(recipe, built[0])))
        problems.attempt(lambda: show_unread(recipe, [*opened["train"], *opened["heldout"]], built[1]))
    _check_surroundings(recipe, problems)
    return _without_repetitions(problems)


def _counted_in_steps(recipe: Recipe, problems: _Problems) -> Recipe:
    """Measure the steps and packs of a recipe that counts epochs or samples, and say how many they are."""
    counted = problems.attempt(lambda: in_steps(recipe))
    if counted is None:
        return recipe
    train = counted.train
    console.print(f"{train.steps} steps of {train.packs_per_step} packs (train.epochs, train.samples_per_step)")
    return counted


def check_without_tokenizer(recipe: Recipe, num_ranks: int | None = None) -> list[str]:
    """Like :func:`check_recipe`, of a recipe whose tokenizer and data do not exist yet; print what is not checked."""
    quiet_libraries()
    problems = _Problems()
    _check_model(recipe, problems.attempt(lambda: build_without_tokenizer(recipe)), None, num_ranks, problems)
    _check_surroundings(recipe, problems)
    console.print("not checked: the tokenizer, the chat format, the data, and whether every key has an effect")
    return _without_repetitions(problems)


class _Problems(list[str]):
    """The problems found so far, one text each."""

    def attempt(self, action: Callable[[], Any]) -> Any:
        """Return what ``action`` returns; a user's mistake in it is a problem, and the result None."""
        try:
            return action()
        except UserError as error:
            self.extend(error.problems)
            return None


def _check_model(
    recipe: Recipe,
    model: OmniModel | None,
    processor: OmniProcessor | None,
    num_ranks: int | None,
    problems: _Problems,
    one_machine: bool = False,
) -> bool:
    """Show and check a model without weights, and return whether it runs. ``model`` is None if it cannot be built."""
    problems += weights_problems(recipe.model)
    runs = model is not None and problems.attempt(lambda: model.runner) is not None
    device = problems.attempt(lambda: use_device(recipe.train))
    if device is not None and world_size() == 1:  # ranks of a launcher have chosen their devices
        problems.attempt(lambda: _check_devices(device, num_ranks or 1, one_machine))
    if model is None or not runs:
        return False
    _show_model(model)
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for check in _model_checks(recipe, model, processor, device, num_ranks):
        problems.attempt(check)
    broken = forward_problems(model)
    problems += broken
    return not broken


def _check_devices(device: torch.device, num_ranks: int, one_machine: bool) -> None:
    """Check the devices of ranks on this machine, or say how many machines of its size they need."""
    if one_machine:
        require_devices(device, num_ranks)
    elif (machines := machines_for(device, num_ranks)) > 1:
        console.print(
            f"note: {num_ranks} ranks need {machines} machines with {torch.cuda.device_count()} CUDA devices each, as "
            "this one has; start them with torchrun",
            soft_wrap=True,
        )


def _check_surroundings(recipe: Recipe, problems: _Problems) -> None:
    """Check the device, folder and modules that a run needs besides its model and data."""
    problems.attempt(lambda: RunFolder(recipe))
    problems.attempt(lambda: load_scorer(recipe.evaluation.scorer if recipe.evaluation else None))
    problems.attempt(lambda: require_trackers(recipe))
    problems.attempt(lambda: Callbacks(load_callbacks(recipe.train.callbacks), SINGLE_PROCESS))


def problems_of_start(recipe: Recipe, error: UserError, num_ranks: int) -> list[str]:
    """Return the problems of a run that did not start: ``error``, and all others that a check finds. Print nothing."""
    with console.capture():
        found = check_recipe(recipe, num_ranks, one_machine=True)
    return _without_repetitions([*error.problems, *found])


def _without_repetitions(problems: list[str]) -> list[str]:
    """Return each problem once, and none that another one repeats with its key."""
    return [one for one in dict.fromkeys(problems) if not any(other.endswith(f": {one}") for other in problems)]


def _model_checks(
    recipe: Recipe, model: OmniModel, processor: OmniProcessor | None, device: torch.device, num_ranks: int | None
) -> Iterator[Callable[[], Any]]:
    """Yield the checks of a run's model; without a processor, those that need none."""
    mixed = mixed_precision(recipe.train, device.type)
    yield lambda: require_heads(recipe, model.decoders)
    yield lambda: use_own_functions(model, recipe.train)
    yield lambda: require_ops(model, recipe.model.ops, device, compute_dtype(recipe.parallel, mixed))
    yield lambda: _require_plan(recipe, model, mixed, num_ranks)
    yield lambda: _require_rates(model, recipe)
    if processor is not None:
        yield lambda: require_effect(recipe, model, processor)
    experts = recipe.train.experts
    yield lambda: RouterMonitor(model, experts)
    yield lambda: RoutingOfRun(model, experts.record, experts.replay, rank=0)


def check_model(path: str) -> None:
    """Check a HF or omni model (Hub id, folder, or a run's newest) without weights; UserError: it is untrainable.

    Of a HF model, also print what works with it (:func:`omnitrain.parallel.verify.coverage.coverage_of`).
    """
    quiet_libraries()
    if Path(path, "checkpoints").is_dir():
        path = str(newest_checkpoint(path))
    is_omni = isinstance(config_at(path), OmniConfig)
    parts: dict[str, Any] = {"config_path": path} if is_omni else {"foundation": path}
    model = build_omni_model(**parts, init_device="meta")
    _show_model(model)
    if not is_omni:
        console.print("coverage: a copy with few layers trains in one process and on two ranks; the result is kept")
        try:
            show_coverage(coverage_of(model.foundation))
        except UserError as error:
            console.print(f"coverage is not measured: {error}", markup=False, soft_wrap=True)


def _require_plan(recipe: Recipe, model: OmniModel, mixed: bool | None, num_ranks: int | None) -> None:
    """Check that the plan fits the model and the number of ranks, and show the layout."""
    plan = recipe.parallel
    try:
        state, plans = resolve_without_ranks(model, plan, mixed, num_ranks)
    except PlanError as error:
        raise error.under("parallel") from None
    advice = check_micro_batches(recipe, state)
    if plan == ParallelPlan() and state.num_ranks == 1:
        return
    console.print(f"layout on {state.num_ranks} rank{'s' * (state.num_ranks > 1)} (--nproc {state.num_ranks}):")
    sections = {name: section_text(state.of_section(plan.section_of(name))) for name in plans if plan.sections}
    console.print(planned_table(model, plans, unit_names(find_units(model)), sections))
    for line in advice:
        console.print(f"advice: {line}", soft_wrap=True)
    require_fp32(_trained_dtypes(model, plans))


def _trained_dtypes(model: OmniModel, plans: Mapping[str, ComponentPlan]) -> dict[str, torch.dtype]:
    """Return trained parameter -> its planned dtype, for components whose optimizer keeps no fp32 copy."""
    must_stay_fp32, adapters = stays_fp32(model), model.adapter_names
    return {
        name: dtype
        for component, parameters in model.components.items()
        if not (plans[component].memory.offloads("optimizer") or plans[component].freeze)
        and (dtype := dtype_of(plans[component].precision.param)) is not None
        for name, parameter in parameters.items()
        if parameter.requires_grad and name not in adapters and not must_stay_fp32(name)
    }


def _require_rates(model: OmniModel, recipe: Recipe) -> None:
    """Freeze the model as the plan says; check that something trains, and that keys of the optimizer name it."""
    freeze(model, [name for name in model.components if recipe.parallel.of(name).freeze])
    trained_parameters(model)
    peaks_of(model, recipe.train.optimizer)
    decays_of(model, recipe.train.optimizer)
    matrices_of(model, recipe.train.optimizer)
    require_state_format(recipe.train.optimizer)


def _show_model(model: OmniModel) -> None:
    show_components(component_rows(model))
    show_unused(model.config.unused_tensors)
    show_own_head(model.config)
    show_contract(model.runner.contract, in_full=True)


def _check_rows(
    kind: str,
    firsts: list[tuple[str, Sample | Rejected | UserError]],
    teachers: Mapping[str, tuple[str, ...] | None],
) -> list[str]:
    problems = _Problems()
    for name, sample in firsts:
        if isinstance(sample, UserError):
            problems.append(str(sample))
        elif isinstance(sample, Rejected):
            keys = " (data.pack_tokens, data.overlong)" if sample.is_overlong else ""
            problems.append(f"data.{kind}: row {sample.id!r}: {sample.reason}{keys}")
        else:
            if teachers:
                problems.attempt(functools.partial(with_all_inputs, Pack.from_samples([sample]), (), teachers))
            length = sum(piece.input_ids.size for piece in sample.pieces)
            targets = [span.item.num_tokens for piece in sample.pieces for span in piece.spans if span.is_target]
            trained = sum(int(piece.loss_mask.sum()) for piece in sample.pieces) + sum(targets)
            which = f"row {sample.index + 1}, the first that is not skipped," if sample.index else "the first row"
            console.print(f"{kind} {name}: {which} has {length} tokens, {trained} of them trained")
            if lowered := sum(piece.num_lowered for piece in sample.pieces):
                console.print(
                    f"{kind} {name}: `max_frames` lowers the rate of {lowered} video{'s' * (lowered > 1)} of this row"
                )
    return problems


def weights_problems(recipe: Model) -> list[str]:
    """Return a message for each tensor of a recipe's weight files that does not fit; print unused ones."""
    problems = []
    for key, path in _weight_folders(recipe):
        try:
            if key == "model.checkpoint":
                folder = str(newest_checkpoint(path))
                load_strictly(OmniModel, folder, device_map="meta", config=omni_config_at(folder))
            else:
                config, class_of = config_at(path), model_class
                if key == "model.foundation" or key.startswith("model.teachers."):
                    config, class_of = foundation_config(config), foundation_class
                    untie_as_in_files(config, class_of(config), path)
                model = load_strictly(class_of(config), path, allow_extra=True, device_map="meta", config=config)
                show_unused(model.unused_tensors if key == "model.foundation" else None)
        except UserError as error:
            problems.append(f"{key}: {error}")
    return problems


def _weight_folders(recipe: Model) -> list[tuple[str, str]]:
    folders = {"model.checkpoint": recipe.checkpoint}
    sources = {"model.foundation": recipe.foundation}
    sources |= {f"model.encoders.{name}.tower": encoder.tower for name, encoder in recipe.encoders.items()}
    sources |= {
        f"model.encoders.{name}.more_towers.{number}": tower
        for name, encoder in recipe.encoders.items()
        for number, tower in enumerate(encoder.more_towers)
    }
    sources |= {f"model.decoders.{name}.tokenizer": decoder.tokenizer for name, decoder in recipe.decoders.items()}
    folders |= {key: source.path for key, source in sources.items() if source is not None}
    folders |= {f"model.teachers.{name}": teacher.path for name, teacher in recipe.teachers.items()}
    return [(key, folder) for key, folder in folders.items() if folder is not None]


def forward_problems(model: OmniModel) -> list[str]:
    """Run each encoder and decoder on its smallest input, without content; return a message per failure."""
    components = {name: part for name, part in (model.encoders | model.decoders).items() if name not in model.teachers}
    return [problem for name, component in components.items() if (problem := _problem(name, component))]


def _problem(name: str, component: Any) -> str:
    try:
        arguments = component.minimal_input()
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            component.to_empty(device="cpu")
            component.lm_encode(*arguments)
    except NEED_CONTENT:
        return ""
    except UserError as error:
        return f"model, {name}: cannot run: {error}"
    except Exception as error:  # each model fails differently
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return f"model, {name}: cannot run with this config: {reason}"
    return ""

"""``omnitrain VERB``: each verb reads its arguments and calls one function.

The verbs import what they need themselves, so that help and the verbs for recipes start without torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from omnitrain.cli.arguments import OverridesArgument, RecipeArgument, override_hint
from omnitrain.cli.ctrl_c import raised_again_where_lost
from omnitrain.cli.generate import generate
from omnitrain.cli.plan import DeviceOption, plan
from omnitrain.cli.show import show
from omnitrain.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_REQUEUE,
    EXIT_USER_ERROR,
    RecipeError,
    TrainingError,
    UserError,
    problem_list,
)
from omnitrain.packages import require_fitting_torchvision
from omnitrain.train.launch.environment import LAUNCHER, world_size

if TYPE_CHECKING:
    from omnitrain.recipe import Recipe
    from omnitrain.train.run_state.run_folder import Resume


def resume_hint(folder: str) -> str:
    """Return how to continue the run of this process, or of this rank; its recipe has all overrides."""
    is_launched = LAUNCHER in os.environ  # by `omnitrain run --nproc`
    ranks = ["--nproc", str(world_size())] if is_launched else []
    command = shlex.join(["run", folder, *ranks])
    if world_size() > 1 and not is_launched:
        return f"to continue, start `-m omnitrain {command}` in place of `-m omnitrain run ...`"
    found = shutil.which("omnitrain")
    is_ours = found is not None and Path(found).parent == Path(sys.executable).parent
    program = ["omnitrain"] if is_ours else [sys.executable, "-m", "omnitrain"]
    return f"to continue: {shlex.join(program)} {command}"


# The verbs that take overrides.
_WITH_RECIPE = ("show", "check", "plan", "run", "profile", "verify")
_MODEL_VERBS = ("check", "plan", "run", "profile", "verify", "generate", "export")  # the others work without torch
_OLD_VERBS = {
    "resume": "run FOLDER",
    "schedule": "show RECIPE --schedule",
    "preview": "show RECIPE --packs",
    "data": "show RECIPE --stats",
    "schema": "show --schema",
    "chat": "generate CHECKPOINT --chat",
}


class _Verbs(TyperGroup):
    """Print the message of a user's mistake and set the exit code; other exceptions keep their traceback."""

    def invoke(self, ctx: Any) -> Any:
        arguments = list(ctx.args)
        try:
            with raised_again_where_lost():
                return super().invoke(ctx)
        except UserError as error:
            _say(str(error))
            raise typer.Exit(EXIT_USER_ERROR) from None
        except TrainingError as error:
            _say(str(error))
            raise typer.Exit(EXIT_FAILED) from None
        except KeyboardInterrupt:
            _say("interrupted")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except Exception as error:
            option = getattr(error, "option_name", None)  # the parser's NoSuchOption has it
            if option is None or ctx.invoked_subcommand not in _WITH_RECIPE:
                raise
            words = override_hint(option, arguments, is_near_option=bool(getattr(error, "possibilities", None)))
            if words is None:
                raise
            _say(words)
            raise typer.Exit(EXIT_USER_ERROR) from None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in _OLD_VERBS:
            raise UserError(f"there is no `omnitrain {args[0]}`; write `omnitrain {_OLD_VERBS[args[0]]}`")
        return super().resolve_command(ctx, args)


def _say(message: str) -> None:
    from omnitrain.train.launch.environment import own_words

    if (words := own_words(message)) is not None:
        typer.echo(f"omnitrain: {words}", err=True)


app = typer.Typer(
    cls=_Verbs, no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)

RanksOption = Annotated[int, typer.Option("--nproc", help="Number of ranks to start on this machine.", min=1)]
RestartsOption = Annotated[
    int, typer.Option("--max-restarts", help="With --nproc: how often to go on with the ranks left if some die.", min=0)
]


def _loaded(name: str, overrides: list[str] | None) -> Recipe:
    from omnitrain.recipe import Recipe

    return Recipe.load(name, overrides)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        from omnitrain import __version__

        typer.echo(f"omnitrain {__version__}")
        raise typer.Exit


@app.callback()
def omnitrain(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Combine HuggingFace encoders, a language model and decoders into one omni model, and train it."""
    if context.invoked_subcommand in _MODEL_VERBS:
        require_fitting_torchvision()


@app.command("ls")
def list_shipped() -> None:
    """List the shipped recipes."""
    from omnitrain.recipe.tree import list_recipes, summary

    for name, path in list_recipes().items():
        typer.echo(f"{name}  {summary(path)}".rstrip())


app.command()(show)


@app.command()
def cp(
    name: RecipeArgument,
    destination: Annotated[str, typer.Argument(metavar="DEST", help="The new file, or a folder.")],
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Copy a recipe, so that you can edit it."""
    from omnitrain.recipe.tree import copy_recipe

    typer.echo(copy_recipe(name, destination, force=force))


@app.command()
def check(
    model_or_recipe: Annotated[
        str, typer.Argument(metavar="MODEL_OR_RECIPE", help="A recipe, or the folder or Hub id (org/name) of a model.")
    ],
    overrides: OverridesArgument = None,
    nproc: Annotated[
        int | None, typer.Option(help="Number of ranks of the run. Default: a number that fits the plan.", min=1)
    ] = None,
    no_tokenizer: Annotated[
        bool, typer.Option("--no-tokenizer", help="Skip the checks that need the tokenizer or the data.")
    ] = False,
    device: DeviceOption = None,
) -> None:
    """Validate a recipe (or a model) without loading weights, and list problems; with --device, time and memory."""
    if names_a_model(model_or_recipe):
        if overrides or nproc is not None or no_tokenizer or device is not None:
            option = "--no-tokenizer" if no_tokenizer else "--nproc" if nproc is not None else "--device"
            found = f"overrides such as `{overrides[0]}` apply" if overrides else f"{option} applies"
            raise UserError(f"{model_or_recipe}: this is a model; {found} only to recipes")

        from omnitrain.train.verbs.check import check_model

        check_model(model_or_recipe)
        return

    from omnitrain.recipe import Recipe, find_recipe

    try:
        find_recipe(model_or_recipe)
    except RecipeError as error:
        raise RecipeError(f"{error}; there is no model folder of that name either") from None
    resolved = Recipe.load(model_or_recipe, overrides)

    if no_tokenizer:
        from omnitrain.train.verbs.check import check_without_tokenizer as check_of
    else:
        from omnitrain.train.verbs.check import check_recipe as check_of

    from omnitrain.train.planning.devices import find_device

    planned_on = device and find_device(device)
    problems = check_of(resolved, nproc)
    if problems:
        raise UserError(problem_list(model_or_recipe, problems))
    typer.echo(f"no problems in {model_or_recipe}")
    if planned_on:
        from omnitrain.train.verbs.plan import check_plan

        typer.echo(check_plan(resolved, nproc, planned_on))


app.command()(plan)


def names_a_model(name: str) -> bool:
    """Return whether ``name`` is a model: a folder, or ``org/name`` of the Hub; recipes are files or bare names."""
    from omnitrain.recipe.tree import list_recipes

    path = Path(name)
    is_hub_id = name.count("/") == 1 and not path.is_file() and path.suffix not in (".yaml", ".yml")
    return name not in list_recipes() and (path.is_dir() or is_hub_id)


def names_a_folder(name: str) -> bool:
    """Return whether ``name`` is a folder; a shipped recipe takes precedence over a folder of the same name."""
    from omnitrain.recipe.tree import list_recipes

    return Path(name).is_dir() and name not in list_recipes()


@app.command()
def run(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A recipe, or the folder of a run, which then continues.")
    ],
    overrides: OverridesArgument = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest checkpoint in output_dir.")
    ] = False,
    auto_resume: Annotated[
        bool, typer.Option("--auto-resume", help="Start, or continue from the newest intact checkpoint, if one exists.")
    ] = False,
    nproc: RanksOption = 1,
    max_restarts: RestartsOption = 0,
) -> None:
    """Train a recipe, or continue a run from its folder alone, with the recipe that is saved in it."""
    from omnitrain.train.launch.environment import end_with_launcher, is_first_process

    end_with_launcher()
    if resume and auto_resume:
        raise UserError("--resume and --auto-resume exclude each other: --auto-resume also continues; remove --resume")
    words = [recipe, *(overrides or []), *["--resume"] * resume, *["--auto-resume"] * auto_resume]
    is_folder = names_a_folder(recipe)
    resolved = _recipe_of_run(Path(recipe), overrides) if is_folder else _loaded(recipe, overrides)
    if is_first_process() and not is_folder:
        for advice in resolved.advice():
            typer.echo(f"omnitrain: {advice}", err=True)
    _train(resolved, recipe, ["run", *words], nproc, max_restarts, "auto" if auto_resume else resume or is_folder)


def _recipe_of_run(folder: Path, overrides: list[str] | None) -> Recipe:
    saved = folder / "recipe.yaml"
    if not saved.is_file():
        raise UserError(
            f"{folder} is not the folder of a run (no recipe.yaml); name the output_dir of one, or a recipe"
        )
    resolved = _loaded(str(saved), [f"output_dir={json.dumps(str(folder))}", *(overrides or [])])
    if resolved.output_dir != str(folder):
        raise UserError(
            f"{folder} is the folder of a run, which continues there, not in {resolved.output_dir}; remove output_dir="
        )
    return resolved


def _train(recipe: Recipe, name: str, command: list[str], nproc: int, max_restarts: int, resume: Resume) -> None:
    """Train on the ranks of this process's launcher, or start ``nproc`` of them with ``omnitrain COMMAND``."""
    from omnitrain.train.epochs import counts_samples
    from omnitrain.train.launch.environment import global_rank, is_first_process, world_size
    from omnitrain.train.run_state.run_folder import RunFolder

    if max_restarts and nproc == 1:
        raise UserError(
            "--max-restarts starts a run again on the ranks that are left, so it needs --nproc 2 or more; under "
            "torchrun, use torchrun's own --max-restarts, and --auto-resume"
        )
    if world_size() == 1:
        with _all_problems(recipe, name, nproc):
            recipe, settled = _settled(recipe, nproc, continues=bool(resume))
        command = [*command, *settled]
    if resume and not counts_samples(recipe) and (finished := RunFolder(recipe).finished()) is not None:
        if is_first_process():  # before ranks start, and weights are loaded
            typer.echo(finished)
        return
    # A run that has begun may continue, whatever else a check finds in its recipe.
    begins = not (resume and RunFolder(recipe).has_checkpoint)
    if nproc > 1:
        with _all_problems(recipe, name, nproc):
            require_ranks(recipe, nproc)  # before 64 processes find that
        raise typer.Exit(_launch(recipe, ["-m", "omnitrain", *command], nproc, max_restarts, continues=bool(resume)))

    from omnitrain.parallel.state import leave_process_groups
    from omnitrain.train.trainer import Trainer

    with _all_problems(recipe, name, world_size()) if begins else contextlib.nullcontext():
        trainer = Trainer(recipe, resume=resume)
    summary = trainer.fit()
    del trainer  # it holds process groups
    leave_process_groups()
    if summary.interrupted:
        if global_rank() == 0:
            typer.echo(resume_hint(recipe.output_dir))
        raise typer.Exit(EXIT_REQUEUE if summary.is_terminated else EXIT_INTERRUPTED)


def _settled(recipe: Recipe, nproc: int, *, continues: bool) -> tuple[Recipe, list[str]]:
    """Return a recipe in steps and with a layout, and the overrides with which ranks need not find them again."""
    from omnitrain.train.epochs import counts_samples, in_steps

    overrides = []
    if counts_samples(recipe):
        recipe = in_steps(recipe)
        in_words = [f"train.steps={recipe.train.steps}", f"train.packs_per_step={recipe.train.packs_per_step}"]
        overrides += ["train.epochs=null", "train.samples_per_step=null", *in_words]
    if recipe.parallel.auto:
        from omnitrain.train.verbs.plan import with_layout

        recipe = with_layout(recipe, nproc, continues=continues)
        overrides += [f"parallel={json.dumps(recipe.parallel.model_dump(mode='json', exclude_defaults=True))}"]
    return recipe, overrides


def _launch(recipe: Recipe, arguments: list[str], nproc: int, max_restarts: int, *, continues: bool) -> int:
    """Start the ranks of a run with these arguments of python, which may continue it; again if ranks are killed."""
    from omnitrain.train.launch.launch import crowding, launch_with_restarts
    from omnitrain.train.run_state.run_folder import begun_at

    before = begun_at(recipe)

    def arguments_now() -> list[str]:
        has_begun = not continues and begun_at(recipe) != before  # otherwise the folder may have an older run
        return [*arguments, "--auto-resume"] if has_begun else arguments

    def fits(ranks: int) -> bool:
        try:
            require_ranks(recipe, ranks)
        except UserError:
            return False
        return True

    if (warning := crowding(recipe.train.device, nproc)) is not None:
        typer.echo(f"omnitrain: {warning}", err=True)
    return launch_with_restarts(
        arguments_now,
        nproc,
        max_restarts=max_restarts,
        fits=fits,
        say=lambda words: typer.echo(f"omnitrain: {words}", err=True),
        stop_seconds=recipe.train.stop_seconds,
    )


def require_ranks(recipe: Recipe, ranks: int) -> None:
    """Raise UserError if a recipe does not work on a number of ranks, as far as that is known without its model."""
    from omnitrain.parallel.state import state_without_groups
    from omnitrain.train.micro_batches import check_micro_batches

    check_micro_batches(recipe, state_without_groups(recipe.parallel, ranks))


@contextlib.contextmanager
def _all_problems(recipe: Recipe, name: str, num_ranks: int) -> Iterator[None]:
    """Add all that ``check`` finds to a user's mistake in this context."""
    try:
        yield
    except UserError as error:
        from omnitrain.train.verbs.check import problems_of_start

        raise UserError(problem_list(name, problems_of_start(recipe, error, num_ranks))) from None


@app.command()
def verify(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    layouts: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated layouts: plan (the recipe's own), dp4, hsdp2x2, replicate2, dp2.accum2.recompute, "
            "... Default: plan (if the recipe has one), and those of dp2, dp4, hsdp2x2 that --nproc allows."
        ),
    ] = None,
    nproc: Annotated[int, typer.Option(help="Number of ranks to start on this machine.", min=1)] = 4,
    samples: Annotated[int, typer.Option(help="Number of samples in the global batch.", min=1)] = 12,
) -> None:
    """Check that layouts on several ranks train like one process: loss, every gradient, every weight."""
    resolved = _loaded(recipe, overrides)

    from omnitrain.train.verbs.verify import verify_recipe

    words = [word.strip() for word in layouts.split(",")] if layouts is not None else ()
    report = verify_recipe(resolved, words, nproc=nproc, num_samples=samples)
    typer.echo(str(report), nl=False)
    if not report.ok:
        for row in report.refused:
            typer.echo(f"omnitrain: {row.layout} was not verified: {row.reason}", err=True)
        raise typer.Exit(EXIT_FAILED)


@app.command()
def profile(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    steps: Annotated[int, typer.Option(help="Number of steps to time, and then to profile.", min=1)] = 3,
    output: Annotated[Path, typer.Option(metavar="DIR", file_okay=False, help="Folder for the traces.")] = Path(
        "profile"
    ),
    nproc: RanksOption = 1,
) -> None:
    """Run a few steps under torch's profiler: what costs most, FLOPs and MFU, and what to try. Saves no run."""
    from omnitrain.train.launch.environment import end_with_launcher, world_size

    end_with_launcher()
    resolved = _loaded(recipe, overrides)
    settled: list[str] = []
    if world_size() == 1 and resolved.parallel.auto:
        with _all_problems(resolved, recipe, nproc):
            resolved, settled = _settled(resolved, nproc, continues=False)
    if nproc > 1:
        from omnitrain.train.launch.launch import launch

        with _all_problems(resolved, recipe, nproc):
            require_ranks(resolved, nproc)
        words = ["profile", recipe, *(overrides or []), *settled, f"--steps={steps}", f"--output={output}"]
        raise typer.Exit(launch(["-m", "omnitrain", *words], nproc, stop_seconds=resolved.train.stop_seconds))

    from omnitrain.parallel.state import leave_process_groups
    from omnitrain.train.profile import profile_recipe

    with _all_problems(resolved, recipe, world_size()):
        profile_recipe(resolved, output, steps)
    leave_process_groups()


app.command()(generate)


@app.command()
def export(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="Folder of a run, or of a saved omni model.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="New folder for the HuggingFace model.")],
    dtype: Annotated[
        str | None, typer.Option(help="Dtype of the weights: float32, bfloat16, float16. Default: as in the source.")
    ] = None,
    foundation_only: Annotated[
        bool, typer.Option("--foundation-only", help="Leave out attached encoders and decoders.")
    ] = False,
    source: Annotated[
        str | None, typer.Option(help="The checkpoint from which the foundation was loaded, if it was moved.")
    ] = None,
    ema: Annotated[
        bool, typer.Option("--ema", help="Write the averages of `train.ema` in place of the trained weights.")
    ] = False,
) -> None:
    """Export in the HuggingFace format, for transformers and other tools, if it has a class for the model."""
    from omnitrain.train.verbs.export import export as write

    typer.echo(write(checkpoint, folder, dtype, foundation_only=foundation_only, source=source, ema=ema))


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN [RUN ...]", help="Folders of runs; several are compared.")],
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page. Default: report.html, of one run in its folder.")
    ] = None,
) -> None:
    """Write a page about runs: curves, samples, traced steps, layout, recipe, environment. It needs no network."""
    from omnitrain.report.write import REPORT_FILE, write_report

    file = output or (runs[0] / REPORT_FILE if len(runs) == 1 else Path(REPORT_FILE))
    typer.echo(write_report(runs, file))


@app.command()
def doctor() -> None:
    """Print versions, devices, memory and optional packages, and why a package is missing."""
    from omnitrain.report.doctor import examine, render

    typer.echo(render(examine()))

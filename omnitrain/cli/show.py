"""``omnitrain show``: a recipe, and what follows from it before a run starts: its schedule, its packs, its data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omnitrain.cli.arguments import OverridesArgument, require_writable
from omnitrain.errors import UserError
from omnitrain.packages import require_fitting_torchvision

if TYPE_CHECKING:
    from omnitrain.recipe import Recipe

_OPTIONS = {  # what is shown -> the options that it takes
    "recipe": (),
    "schema": (),
    "packs": ("num_packs", "output"),
    "stats": ("rows", "output", "json"),
    "schedule": ("nproc", "forward", "backward", "encode", "json"),
}


def show(
    context: typer.Context,
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="A YAML file, or the name of a shipped recipe.")
    ] = None,
    overrides: OverridesArgument = None,
    schedule: Annotated[
        bool, typer.Option("--schedule", help="Simulate a step of its pipeline and sections. Starts no ranks.")
    ] = False,
    packs: Annotated[
        bool,
        typer.Option(
            "--packs", help="Packs as the model gets them: tokens, loss mask, media, positions, rejected rows."
        ),
    ] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Lengths, modalities, rejected rows, epochs and the expected fill of packs.")
    ] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="The JSON schema of all recipes, for completion in an editor.")
    ] = False,
    num_packs: Annotated[int, typer.Option(help="--packs: number of packs.", min=1)] = 2,
    rows: Annotated[int, typer.Option(help="--stats: number of rows of each data set to measure.", min=1)] = 2000,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", dir_okay=False, help="--packs, --stats: also write one page that needs no network."
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", dir_okay=False, help="--schedule, --stats: also write the numbers."),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(help="--schedule: number of ranks of the run. Default: a number that fits the plan.", min=1),
    ] = None,
    forward: Annotated[
        float | None, typer.Option(help="--schedule: seconds of the forward of a micro-batch through all stages.")
    ] = None,
    backward: Annotated[
        float | None, typer.Option(help="--schedule: seconds of its backward. Default: twice as long as the forward.")
    ] = None,
    encode: Annotated[
        float | None,
        typer.Option(
            help="--schedule: seconds in which one rank encodes a micro-batch, for each encoder of a section."
        ),
    ] = None,
) -> None:
    """Print a recipe, or with an option what follows from it: its schedule, its packs, statistics of its data."""
    shown = _what_to_show({"schedule": schedule, "packs": packs, "stats": stats, "schema": schema})
    _refuse_other_options(context, shown)
    require_writable("--json", json_file)
    if shown == "schema":
        _show_schema(recipe)
    elif recipe is None:
        raise UserError("show: found no RECIPE; name a YAML file or a shipped recipe (`omnitrain ls`), or add --schema")
    elif shown == "recipe":
        _show_recipe(recipe, overrides)
    else:
        from omnitrain.recipe import Recipe

        require_fitting_torchvision()
        resolved = Recipe.load(recipe, overrides)
        if shown == "packs":
            _show_packs(resolved, num_packs, output)
        elif shown == "stats":
            _show_stats(resolved, rows, output, json_file)
        else:
            _show_schedule(resolved, nproc, {"forward": forward, "backward": backward, "encode": encode}, json_file)


def _what_to_show(asked: Mapping[str, bool]) -> str:
    chosen = [name for name, is_asked in asked.items() if is_asked]
    if len(chosen) > 1:
        raise UserError(f"--{chosen[0]} and --{chosen[1]} exclude each other: call `omnitrain show` once for each")
    return chosen[0] if chosen else "recipe"


def _refuse_other_options(context: typer.Context, shown: str) -> None:
    """Raise UserError for an option that only something else than ``shown`` takes."""
    for name in sorted({name for names in _OPTIONS.values() for name in names} - set(_OPTIONS[shown])):
        source = context.get_parameter_source("json_file" if name == "json" else name)
        if source is not None and source.name == "COMMANDLINE":
            takers = " or ".join(f"--{other}" for other, names in _OPTIONS.items() if name in names)
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"{option} belongs to `show RECIPE {takers}`; add that option, or remove {option}")


def _show_recipe(name: str, overrides: list[str] | None) -> None:
    from omnitrain.recipe.tree import find_recipe

    if overrides:
        raise UserError(
            f"show prints the file {name}, to which overrides such as `{overrides[0]}` do not apply; remove them, or "
            "add --schedule, --packs or --stats"
        )
    typer.echo(find_recipe(name).read_text(encoding="utf-8"), nl=False)


def _show_schema(recipe: str | None) -> None:
    from omnitrain.recipe import json_schema

    if recipe is not None:
        raise UserError(f"--schema is the same for all recipes; remove {recipe}")
    typer.echo(json.dumps(json_schema(), indent=2))


def _show_packs(recipe: Recipe, num_packs: int, output: Path | None) -> None:
    from omnitrain.train.metrics.console import console
    from omnitrain.train.verbs.preview import preview

    shown = preview(recipe, packs=num_packs)
    console.print(shown, soft_wrap=True)
    if output is not None:
        typer.echo(shown.save(output))


def _show_stats(recipe: Recipe, rows: int, output: Path | None, json_file: Path | None) -> None:
    from omnitrain.train.metrics.console import console
    from omnitrain.train.verbs.preview import data_stats

    found = data_stats(recipe, rows=rows)
    console.print(found)
    for file in (output and found.save(output), json_file and found.save_json(json_file)):
        if file is not None:
            typer.echo(file)


def _show_schedule(recipe: Recipe, nproc: int | None, seconds: Mapping[str, Any], json_file: Path | None) -> None:
    for option, value in seconds.items():
        if value is not None and value <= 0:
            raise UserError(f"--{option}: found {value:g}; expected a number of seconds above 0")

    from omnitrain.train.verbs.schedule import show_schedule

    shown = show_schedule(recipe, nproc, **seconds)
    if json_file is not None:
        json_file.write_text(json.dumps(shown, indent=2) + "\n", encoding="utf-8")
        typer.echo(f"wrote {json_file}")

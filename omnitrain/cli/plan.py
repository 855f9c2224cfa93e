"""``omnitrain plan``: the best layouts of a recipe on devices that need not be here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from omnitrain.cli.arguments import OverridesArgument, RecipeArgument, require_writable
from omnitrain.errors import UserError

_BYTES = {"": 2**30, "GiB": 2**30, "MiB": 2**20, "GB": 10**9}

DeviceOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="a100, h100, h200, b200, or measured: this machine's CPU, measured now."),
]


def plan(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    gpus: Annotated[int, typer.Option(help="Number of devices, one for each rank.", min=1)] = 8,
    device: DeviceOption = "h100",
    gpus_per_node: Annotated[
        int | None, typer.Option(help="Devices of a node. Default: that of the device's usual server.", min=1)
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of a device, such as 80GiB. Default: its own.")
    ] = None,
    top: Annotated[int, typer.Option(help="Number of layouts to show.", min=1)] = 5,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", dir_okay=False, help="Also write the numbers.")
    ] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Write the best layout as `parallel` into the recipe's file.")
    ] = False,
) -> None:
    """Choose a layout: time, MFU, idle time and memory of the best ones, and why others are not. Starts no ranks."""
    from omnitrain.recipe import Recipe

    size = None if memory is None else memory_size(memory)
    resolved = Recipe.load(recipe, overrides)

    from omnitrain.train.metrics.console import console
    from omnitrain.train.planning.devices import find_device
    from omnitrain.train.verbs.plan import apply_plan, plan_recipe, require_own_file

    require_writable("--json", json_file)
    if apply:
        require_own_file(recipe)
    planned = plan_recipe(resolved, gpus, find_device(device or "", per_node=gpus_per_node, memory=size), top=top)
    console.print(planned, soft_wrap=True)
    if json_file is not None:
        json_file.write_text(json.dumps(planned.as_json(), indent=2) + "\n", encoding="utf-8")
        typer.echo(f"wrote {json_file}")
    if apply:
        typer.echo(f"wrote `parallel` into {apply_plan(recipe, planned.best[0].plan)}")


def memory_size(text: str) -> float:
    """Return the bytes of a size such as ``80GiB``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(\w*)", text.strip())
    if found is None or found[2] not in _BYTES or not float(found[1]):
        raise UserError(f"--memory {text}: expected a number above 0 with GiB, MiB or GB, such as 80GiB")
    return float(found[1]) * _BYTES[found[2]]

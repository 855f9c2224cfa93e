"""The recipes that come with omnitrain: ``recipes/`` of a checkout, or its copy inside an installed wheel."""

from __future__ import annotations

import shutil
from pathlib import Path

from omnitrain.errors import RecipeError
from omnitrain.recipe.suggest import hint

_PACKAGE = Path(__file__).parents[1]


def recipes_folder() -> Path:
    """The folder of the shipped recipes."""
    installed = _PACKAGE / "recipes"
    return installed if installed.is_dir() else _PACKAGE.parent / "recipes"


def list_recipes() -> dict[str, Path]:
    """The shipped recipes: name -> file, sorted by name."""
    return {path.stem: path for path in sorted(recipes_folder().glob("*.yaml"))}


def summary(path: Path) -> str:
    """The first comment line of a recipe, without its ``#``; empty if there is none."""
    comments = (line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#"))
    return next(comments, "").lstrip("#").strip()


def find_recipe(path: str | Path) -> Path:
    """The file that ``path`` means: a file, or the bare name of a shipped recipe.

    Raises:
        RecipeError: neither; says what was looked for where, and the nearest shipped name.
    """
    if Path(path).is_file():
        return Path(path)
    shipped = list_recipes()
    if str(path) in shipped:
        return shipped[str(path)]
    raise RecipeError(
        f"no recipe `{path}`: looked for the file {Path(path).absolute()} and for a shipped recipe of that name in "
        f"{recipes_folder()}; {_advice(Path(path).stem, shipped)}"
    )


def copy_recipe(name: str, destination: str | Path, *, force: bool = False) -> Path:
    """Copy a recipe for editing.

    Args:
        name: a shipped recipe's name, or a file.
        destination: a file, or a folder to copy into.
        force: overwrite what is there.

    Returns:
        The file written.

    Raises:
        RecipeError: no such recipe, no such folder, a file that cannot be written, is the recipe itself, or is there
            and ``force`` is not set.
    """
    source = find_recipe(name)
    target = Path(destination)
    if target.is_dir():
        target = target / source.name
    if not target.parent.is_dir():
        raise RecipeError(f"no folder {target.parent} to copy `{name}` into; make it first")
    if target.exists() and not force:
        raise RecipeError(f"{target} exists; choose another name, or overwrite it with --force")
    if target.exists() and target.samefile(source):
        raise RecipeError(f"{target} is `{name}` itself; choose another destination")
    try:
        shutil.copyfile(source, target)
    except OSError as error:
        raise RecipeError(f"{target} cannot be written: {error.strerror}; choose another destination") from None
    return target


def _advice(stem: str, shipped: dict[str, Path]) -> str:
    return hint(stem, shipped) if shipped else "that folder holds no recipe"

"""The shipped recipes: ``recipes/`` of a checkout, or its copy in an installed wheel."""

from __future__ import annotations

import shutil
from pathlib import Path

from omnitrain.errors import RecipeError
from omnitrain.recipe.suggest import hint

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

"""Metrics of a run in programs that draw them: TensorBoard, Weights & Biases, Trackio."""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from omnitrain.errors import UserError
from omnitrain.recipe import Recipe
from omnitrain.train.metrics.display import console

_MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}
_ID = "tracked_as"  # file of a run's id, by which a resumed run goes on in its curves


class Tracker(Protocol):
    """What draws metrics.

    Attributes:
        name: in ``train.track.to``.
    """

    name: str

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values of a step, by names such as ``heads/text/loss``."""
        ...

    def close(self, *, failed: bool) -> None:
        """The run is over, or an error ended it."""
        ...


def require_trackers(recipe: Recipe) -> None:
    """The packages of ``train.track.to`` are there.

    Raises:
        UserError: some are not.
    """
    for name in recipe.train.track.to:
        _module(name)


def open_trackers(recipe: Recipe, folder: Path, resume_step: int) -> list[Tracker]:
    """Those that ``train.track`` names.

    Args:
        recipe: of the run; it is shown beside the curves.
        folder: of the run, which is there.
        resume_step: steps done; what an earlier start drew behind them is replaced, where that is possible.

    Raises:
        UserError: a package is missing, or its program cannot begin.
    """
    return [_begun(name, recipe, folder, resume_step) for name in recipe.train.track.to]


def tell(trackers: list[Tracker], what: Callable[[Tracker], None]) -> None:
    """Do ``what`` with each. One that fails is taken from the list: the run goes on without it."""
    for tracker in list(trackers):
        try:
            what(tracker)
        except Exception as error:  # of a disk, a network, a program
            trackers.remove(tracker)
            console.print(
                f"train.track: {tracker.name} failed ({type(error).__name__}: {error}) and is told no more; "
                "metrics.jsonl has all numbers",
                markup=False,
            )


def numbers_in(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a line of metrics with their names, joined by slashes."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from numbers_in(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{prefix}{key}", value


def _begun(name: str, recipe: Recipe, folder: Path, resume_step: int) -> Tracker:
    program = _module(name)
    try:
        if name == "tensorboard":
            return _TensorBoard(program, folder, resume_step)
        return _Session(name, program, recipe, folder)
    except Exception as error:  # each program refuses in its own way
        raise UserError(
            f"train.track.to: {name!r} cannot begin ({type(error).__name__}: {error}); see its own settings, or "
            "remove it from the list"
        ) from error


class _TensorBoard:
    """Event files in ``tensorboard/`` of the run's folder."""

    name = "tensorboard"

    def __init__(self, program: Any, folder: Path, resume_step: int) -> None:
        self._writer = program.SummaryWriter(str(folder / "tensorboard"), purge_step=resume_step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        self._writer.close()


class _Session:
    """A run of a program with the functions of wandb: ``init``, ``log`` and ``finish``."""

    def __init__(self, name: str, program: Any, recipe: Recipe, folder: Path) -> None:
        self.name, self._program = name, program
        file, settings = folder / _ID, recipe.train.track
        if not (file.is_file() and file.read_text()):
            file.write_text(uuid.uuid4().hex)
        own = {"id": file.read_text(), "name": settings.name or folder.name, "dir": str(folder)}
        if name != "wandb":  # they know a run by its name: one of that name in another folder would get these values
            own = {"name": f"{own['name']}-{own['id'][:8]}"}
        program.init(project=settings.project, config=recipe.model_dump(mode="json"), resume="allow", **own)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._program.log(dict(values), step=step)

    def close(self, *, failed: bool) -> None:
        own = {"exit_code": int(failed)} if self.name == "wandb" else {}
        self._program.finish(**own)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(_MODULES[name])
    except ImportError as error:
        raise UserError(
            f"train.track.to: {name!r} needs its package ({error}); pip install {name}, or remove it from the list"
        ) from None

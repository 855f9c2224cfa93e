"""Log metrics of a run to trackers: TensorBoard, Weights & Biases, Trackio."""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import soundfile
from PIL import Image

from omnitrain.errors import UserError
from omnitrain.packages import install_command
from omnitrain.recipe import Recipe
from omnitrain.train.metrics.console import console

_MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}
_EXTRAS = {"tensorboard": "track"}  # of the others, the extra has the tracker's name
_SOUNDS = (".wav", ".flac", ".ogg", ".mp3", ".riff", ".bin")
_ID = "tracked_as"  # file with the run's id, so that a resumed run continues its curves


Part = str | Path  # a text, or the file of an image, a sound or a video


@dataclass(frozen=True)
class ShownSample:
    """An answer to a held-out row, as a run shows it in files and trackers."""

    name: str  # the source, and the number of the row in it
    # ``prompt``, ``answer`` and ``reference`` (empty if the row has none) -> its parts
    roles: Mapping[str, Sequence[Part]]


class Tracker(Protocol):
    """Logs metrics to a program, which ``name`` names in ``train.track.to``."""

    name: str

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of a step, with names such as ``heads/text/loss``."""

    def show(self, step: int, samples: Sequence[ShownSample]) -> None:
        """Log answers of a step with their images and sounds."""

    def close(self, *, failed: bool) -> None:
        """End the run in the tracker; ``failed``: an error ended it."""


def require_trackers(recipe: Recipe) -> None:
    """Raise UserError if a package of ``train.track.to`` is not installed."""
    for name in recipe.train.track.to:
        _module(name)


def open_trackers(recipe: Recipe, folder: Path, resume_step: int) -> list[Tracker]:
    """Open ``train.track``'s trackers after ``resume_step`` steps; UserError: one is missing or cannot start."""
    return [_begun(name, recipe, folder, resume_step) for name in recipe.train.track.to]


def tell(trackers: list[Tracker], what: Callable[[Tracker], None], given: str = "metrics") -> None:
    """Give each tracker something. A tracker that fails is removed from the list, and the run continues."""
    for tracker in list(trackers):
        try:
            what(tracker)
        except Exception as error:  # an error of a disk, a network, or the tracker
            trackers.remove(tracker)
            console.print(
                f"train.track: {tracker.name} failed ({type(error).__name__}: {error}) and gets no more {given}; "
                f"{'metrics.jsonl' if given == 'metrics' else 'samples/'} has all of them",
                markup=False,
            )


def _begun(name: str, recipe: Recipe, folder: Path, resume_step: int) -> Tracker:
    program = _module(name)
    try:
        if name == "tensorboard":
            return _TensorBoard(program, folder, resume_step)
        return _Session(name, program, recipe, folder)
    except Exception as error:  # each tracker fails differently
        raise UserError(
            f"train.track.to: {name!r} cannot start ({type(error).__name__}: {error}); check its settings, or remove "
            "it from the list"
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

    def show(self, step: int, samples: Sequence[ShownSample]) -> None:
        for sample in samples:
            for role, parts in sample.roles.items():
                if text := _text(parts):
                    self._writer.add_text(f"samples/{sample.name}/{role}", text, step)
        for name, _, file in _media(samples, "image"):
            self._writer.add_image(name, _picture(file), step, dataformats="HWC")
        for name, _, file in _media(samples, "audio"):
            heard, rate = _sound(file)
            self._writer.add_audio(name, heard[None], step, sample_rate=rate)
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        self._writer.close()


class _Session:
    """A run of a tracker with the functions of wandb: ``init``, ``log`` and ``finish``."""

    def __init__(self, name: str, program: Any, recipe: Recipe, folder: Path) -> None:
        self.name, self._program = name, program
        file, settings = folder / _ID, recipe.train.track
        if not (file.is_file() and file.read_text()):
            file.write_text(uuid.uuid4().hex)
        options = {"id": file.read_text(), "name": settings.name or folder.name, "dir": str(folder)}
        if name != "wandb":  # other trackers identify a run by its name, which a run in another folder may have, too
            options = {"name": f"{options['name']}-{options['id'][:8]}"}
        program.init(project=settings.project, config=recipe.model_dump(mode="json"), resume="allow", **options)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._program.log(dict(values), step=step)

    def show(self, step: int, samples: Sequence[ShownSample]) -> None:
        program = self._program
        texts = [[sample.name, *map(_text, sample.roles.values())] for sample in samples]
        columns = ["sample", "prompt", "answer", "reference"]
        logged = {"samples/texts": program.Table(columns=columns, data=texts)}  # `samples` is a number of the metrics
        for name, role, file in _media(samples, "image"):
            logged[name] = program.Image(_picture(file), caption=role)
        for name, role, file in _media(samples, "audio"):
            heard, rate = _sound(file)
            pcm = (heard.clip(-1, 1) * np.iinfo(np.int16).max).astype(np.int16)  # Trackio warns about floats
            logged[name] = program.Audio(pcm, caption=role, sample_rate=rate)
        program.log(logged, step=step)

    def close(self, *, failed: bool) -> None:
        options = {"exit_code": int(failed)} if self.name == "wandb" else {}
        self._program.finish(**options)


def _text(parts: Sequence[Part]) -> str:
    return " ".join(part for part in parts if isinstance(part, str)).strip()


def _media(samples: Sequence[ShownSample], kind: str) -> Iterator[tuple[str, str, Path]]:
    """Yield name, role and file of each image, or of each sound. Videos are images: their first frame is shown."""
    for sample in samples:
        for role, parts in sample.roles.items():
            files = [part for part in parts if isinstance(part, Path)]
            for number, file in enumerate(file for file in files if (file.suffix in _SOUNDS) == (kind == "audio")):
                yield f"samples/{sample.name}/{role} {number}", role, file


def _picture(file: Path) -> np.ndarray:
    """Return ``[height, width, 3]``, uint8."""
    with Image.open(file) as picture:
        return np.asarray(picture.convert("RGB"))


def _sound(file: Path) -> tuple[np.ndarray, int]:
    """Return the samples ``[n]`` of all channels together, float32, and the rate."""
    heard, rate = soundfile.read(file, dtype="float32", always_2d=True)
    return heard.mean(axis=1), rate


def _module(name: str) -> Any:
    try:
        return importlib.import_module(_MODULES[name])
    except ImportError as error:
        raise UserError(
            f"train.track.to: {name!r} is not installed ({error}); {install_command(_EXTRAS.get(name, name))}, or "
            "remove it from the list"
        ) from None

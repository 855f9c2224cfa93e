"""Save checkpoints of a run under any layout, while it trains on or while it waits. Each rank writes its shards."""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from omnitrain.checkpoint.model_files import ADAPTERS, ModelFiles
from omnitrain.checkpoint.optimizer import load_optimizer, optimizer_state
from omnitrain.checkpoint.pieces import PieceOwners
from omnitrain.checkpoint.shared_memory import require_sendable
from omnitrain.checkpoint.store import write_metrics
from omnitrain.data.loading.slots import LoaderState
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.errors import UserError
from omnitrain.models.adapters.lora import token_matrices
from omnitrain.models.omni.model import OmniModel
from omnitrain.models.omni.save import files_of, model_pieces, small_files
from omnitrain.parallel.step.item_costs import UNUSED_STEPS
from omnitrain.peers import all_or_raise, parameters_at_rest, raise_on_all
from omnitrain.recipe.parallel import FOUNDATION
from omnitrain.report.run_record import ENVIRONMENT_FILE, LAYOUT_FILE
from omnitrain.train.metrics.console import console
from omnitrain.train.process_groups import Ranks
from omnitrain.train.run_state.run_folder import RunFolder
from omnitrain.train.run_state.snapshot import Snapshot, write_snapshot
from omnitrain.train.run_state.writer import CheckpointWriter

_FILE = "trainer.pt"
_SHOWN = 3


@dataclass(frozen=True)
class TrainingState:
    """The state of a run, from which it resumes."""

    step: int = 0
    seconds: float = 0.0  # training time so far, over all starts
    steps_without_targets: int = 0
    data: LoaderState = field(default_factory=LoaderState)  # state of the data, over all ranks
    rows: tuple[int, ...] = ()  # rows of each training data set
    # layer with experts -> the experts' shares of the last step's tokens
    expert_shares: dict[str, list[float]] = field(default_factory=dict)
    expert_chunks: dict[str, int] | None = None  # component -> the fastest number of chunks. None: it was not measured
    # component -> the quadratic part of its items' cost. None: it was not measured
    quadratic_costs: dict[str, float] | None = None
    # component -> seconds of its work (:class:`Measured`). None: it was not measured
    section_seconds: dict[str, float] | None = None
    measured_costs_unused_until: int = UNUSED_STEPS  # the last step that is planned without these two
    # head -> source -> sum of its losses and tokens, since the last line of metrics
    losses: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    mean_loss: float = 0.0  # mean total loss of the same steps, over ``loss_tokens`` predicted tokens of all heads
    loss_tokens: int = 0
    samples: int = 0


def write_state(folder: Path, state: TrainingState, trainable: Sequence[str]) -> None:
    """Write ``state`` and the names of the trained parameters to ``folder``, the folder of a checkpoint."""
    torch.save({"state": asdict(state), "trainable": list(trainable)}, folder / _FILE)


def read_state(folder: Path) -> tuple[TrainingState, list[str]]:
    """Read the state that :func:`write_state` wrote; UserError: of an order of samples that this version lacks."""
    saved = torch.load(folder / _FILE, map_location="cpu", weights_only=True)
    state, data = saved["state"], LoaderState.from_saved(saved["state"]["data"])
    return TrainingState(**(state | {"data": data})), saved["trainable"]


def load_optimizers(
    folder: Path, model: torch.nn.Module, optimizers: Mapping[str, torch.optim.Optimizer], trained: Sequence[str]
) -> None:
    """Read the state of each optimizer; UserError: the model trains other parameters than those in the checkpoint."""
    if changed := sorted(set(trained) ^ set(trainable(model))):
        raise UserError(
            f"{folder}: this recipe trains other parameters than the run did; {len(changed)} differ, such as "
            f"{', '.join(changed[:_SHOWN])}; resume with the `freeze` and `lora` that the run was started with, or "
            "start a new run from its weights"
        )
    for name, optimizer in optimizers.items():
        load_optimizer(model, optimizer, folder / name)


def trainable(model: torch.nn.Module) -> list[str]:
    """Return the names of the trained parameters."""
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


_OF_RUN = ("recipe.yaml", LAYOUT_FILE, ENVIRONMENT_FILE)  # copied from the folder of the run as they are then
_POLL_SECONDS = 0.01
_TOLD_AFTER_SECONDS = 2.0  # of waiting for a checkpoint that is being written
_OTHERS_SECONDS = 60.0  # in which writers of other ranks finish, although their ranks may have ended


class Saver:
    """Saves the checkpoints of a run. All ranks make one, and call its methods together.

    ``optimizers``: folder -> optimizer of its trained parameters, or their averages. ``in_background``: let a process
    of its own write, where :meth:`save` need not wait.
    """

    def __init__(
        self,
        run: RunFolder,
        ranks: Ranks,
        model: OmniModel,
        processor: OmniProcessor,
        optimizers: Mapping[str, torch.optim.Optimizer],
        *,
        in_background: bool,
    ) -> None:
        self._run, self._ranks, self._in_background = run, ranks, in_background
        self._model, self._processor, self._optimizers = model, processor, optimizers
        self.is_rehearsed = False  # nor has it saved
        self._writer: CheckpointWriter | None = None
        self._started = 0  # writers so far
        self._begun: int | None = None  # step of the checkpoint that the process is writing

    def rehearse(self, state: TrainingState) -> None:
        """Do all that a save does except to copy and to write, so that it fails at the start of a run if it would."""
        snapshot = self._snapshot(state, None)
        is_sendable = True
        try:
            if self._in_background:
                require_sendable(snapshot)
        except pickle.PicklingError as error:
            is_sendable = False
            console.print(f"training waits for each checkpoint: no other process can write it: {error}")
        if self._ranks.peers.any(not is_sendable):
            self._in_background = False

    def save(self, state: TrainingState, line: Mapping[str, Any] | None, *, waits: bool) -> None:
        """Write the checkpoint of ``state.step``, atomically, after the one that was begun, or raise TrainingError.

        Only the first rank needs the data of the state, and the line of ``metrics.jsonl`` of that step. ``waits``:
        return when it is written, else as soon as what it needs is copied.
        """
        self.finish()
        snapshot = self._snapshot(state, line)
        if waits or not self._in_background:
            write_snapshot(self._run.store, snapshot.on_host(), self._ranks.peers)
        else:
            all_or_raise(self._ranks.peers, lambda: self._begin(snapshot))
        self._ranks.first(lambda: self._run.list_rejected(state.data.rejected))

    def _begin(self, snapshot: Snapshot) -> None:
        if self._writer is None:
            self._writer = CheckpointWriter(self._ranks.rendezvous, self._started)
            self._started += 1
        self._writer.begin(self._run.store, snapshot)
        self._begun = snapshot.step

    @cached_property
    def _unchanging(self) -> tuple[ModelFiles, PieceOwners, dict[str, bytes]]:
        """What does not change while the run trains: files of the model and the processor, and who writes what."""
        files = files_of(self._model, self._ranks.peers)
        owners = PieceOwners(self._model.state_dict(keep_vars=True), self._ranks.peers)
        small = self._on_first(self._processor.save_pretrained)
        if token_matrices(self._model):  # peft's AutoPeftModel makes rows for all tokens of a tokenizer beside adapters
            save_tokenizer = self._processor.tokenizer.save_pretrained
            small |= self._on_first(lambda folder: save_tokenizer(folder / ADAPTERS / FOUNDATION))
        return files, owners, small

    def _snapshot(self, state: TrainingState, line: Mapping[str, Any] | None) -> Snapshot:
        """Return a snapshot, whose tensors are those that train, without copies; see :meth:`save`."""
        files, owners, small = self._unchanging

        def write(folder: Path) -> None:
            write_state(folder, state, trainable(self._model))
            if line is not None:
                write_metrics(folder, line)
            for file in (self._run.path / name for name in _OF_RUN if (self._run.path / name).is_file()):
                (folder / "run").mkdir(exist_ok=True)
                (folder / "run" / file.name).write_bytes(file.read_bytes())

        parameters = parameters_at_rest(self._model)
        states = {name: optimizer_state(parameters, one, owners) for name, one in self._optimizers.items()}
        weights = model_pieces(self._model, owners)
        self.is_rehearsed = True
        return Snapshot(state.step, files, weights, states, {**small, **self._on_first(write)})

    def _on_first(self, write: Callable[[Path], Any]) -> dict[str, bytes]:
        return all_or_raise(self._ranks.peers, lambda: small_files(write) if self._ranks.is_first else {})

    @property
    def is_writing(self) -> bool:
        """Whether the process of this rank is writing."""
        return self._writer is not None and self._writer.is_writing

    @property
    def has_failed(self) -> bool:
        """Whether the process of this rank could not write; :meth:`finish` raises the error on all ranks."""
        return self._writer is not None and not self._writer.is_writing and self._writer.error is not None

    def finish(self) -> Path | None:
        """Wait until the checkpoint that was begun is written, and return its folder. None: none was begun."""
        if self._begun is None:
            return None
        assert self._writer is not None, "it has begun"
        told_at = time.monotonic() + _TOLD_AFTER_SECONDS
        while True:
            is_writing, has_failed = self._ranks.peers.any_of_each([self.is_writing, self.has_failed])
            if has_failed:  # the processes of other ranks may wait for the one that failed
                error = self._writer.error
                self.close()
                raise_on_all(self._ranks.peers, error)
            if not is_writing:
                return self._written()
            if self._ranks.is_first and time.monotonic() > told_at:
                console.print(f"waiting until the checkpoint of step {self._begun} is written")
                told_at = math.inf
            time.sleep(_POLL_SECONDS)

    def _written(self) -> Path:
        """Note that the checkpoint that was begun is complete."""
        assert self._begun is not None, "one was begun"
        store = self._run.store
        store.last = store.saved = written = store.folder_of(self._begun)
        self._begun = None
        return written

    def close(self) -> None:
        """End the process that writes. A checkpoint that it is writing stays unfinished."""
        self._begun = None
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if isinstance(error, Exception) and self.is_writing:  # other ranks may be gone, so this one asks none of them
            console.print(f"the checkpoint of step {self._begun} is still being written; the run ends after it")
            limit = math.inf if self._ranks.peers.size == 1 else time.monotonic() + _OTHERS_SECONDS
            while self.is_writing and time.monotonic() < limit:
                time.sleep(_POLL_SECONDS)
            if self._writer is not None and not self._writer.is_writing and self._writer.error is None:
                self._written()
            else:
                console.print("it was not written; the checkpoint before it is intact")
        self.close()


def checkpoint_bytes(model: torch.nn.Module, has_averages: bool = False) -> int:
    """Return the size of a checkpoint: weights, and fp32 moments, averages and copies (if not fp32) of trained ones."""
    weights = set(model.state_dict(keep_vars=True).values())
    trained = [weight for weight in weights if weight.requires_grad]
    of_trained = sum(weight.numel() * (2 + has_averages + (weight.dtype != torch.float32)) for weight in trained)
    return 4 * of_trained + sum(weight.numel() * weight.element_size() for weight in weights)

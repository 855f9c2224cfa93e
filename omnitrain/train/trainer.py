"""``Trainer(recipe).fit()``: one loop, one step on one screen."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch

from omnitrain.checkpoint.store import CheckpointStore
from omnitrain.data.loader import LoaderState, PackLoader, build_dataloader, first_samples
from omnitrain.data.pack import Pack
from omnitrain.data.processor import OmniProcessor
from omnitrain.data.rows import open_sources
from omnitrain.data.sample import Rejected
from omnitrain.errors import TrainingError, UserError
from omnitrain.models.omni import OmniModel
from omnitrain.models.table import component_rows
from omnitrain.ops.compile import CompiledBlocks, compile_blocks
from omnitrain.optim.adamw import build_optimizer, learning_rate
from omnitrain.optim.gradients import clip_gradients
from omnitrain.recipe import Recipe
from omnitrain.recipe.load import require_heads, save_recipe
from omnitrain.train.display import StepProgress, console, quiet_libraries, show_components, show_scores
from omnitrain.train.evaluate import evaluate, load_scorer
from omnitrain.train.interrupt import Interrupt
from omnitrain.train.metrics import LossMeter, MetricsFile, Stopwatch, peak_memory_mb
from omnitrain.train.samples import save_samples
from omnitrain.train.setup import build_from_recipe, load_checkpoint, use_ops


class NonFiniteError(TrainingError):
    """A loss or gradient became NaN or infinite; the message names the samples. Nothing was updated."""


@dataclass(frozen=True)
class RunSummary:
    """How a run ended.

    Attributes:
        step: optimizer steps done.
        interrupted: Ctrl-C ended it early.
        checkpoint: the last checkpoint.
        scores: of the evaluation; empty without one.
    """

    step: int
    interrupted: bool
    checkpoint: Path
    scores: dict[str, float]


class Trainer:
    """Trains the model of a recipe.

    Attributes:
        recipe: as given.
        model: the model, in place.
        processor: rows -> samples.
        loader: packs of training data.
        optimizer: AdamW.
        step: optimizer steps done.
    """

    def __init__(self, recipe: Recipe, *, resume: bool = False) -> None:
        """Build everything; nothing is written before :meth:`fit`.

        Args:
            recipe: what to train.
            resume: continue the run in ``recipe.output_dir`` from its newest checkpoint.

        Raises:
            UserError: whatever does not fit together in recipe, data and weights.
        """
        started = time.perf_counter()
        quiet_libraries()
        self.recipe = recipe
        self.folder = Path(recipe.output_dir)
        _require_writable(self.folder)
        self.store = CheckpointStore(self.folder / "checkpoints", recipe.train.keep_checkpoints)
        self.device = _device(recipe.train.device)
        if recipe.train.cpu_threads is not None:
            torch.set_num_threads(recipe.train.cpu_threads)
        if recipe.evaluation is not None:
            load_scorer(recipe.evaluation.scorer)
        self.resumed = resume
        checkpoint = self._checkpoint_to_resume() if resume else None
        self.model: OmniModel
        self.processor: OmniProcessor
        self.model, self.processor = (
            load_checkpoint(checkpoint, recipe.model.freeze) if checkpoint else build_from_recipe(recipe)
        )
        require_heads(recipe, self.model.decoders)
        self.model.to(self.device).train()
        self.ops = use_ops(self.model, recipe.model.ops)
        self.compiled = self._compiled()
        self.optimizer = build_optimizer(self.model, recipe.train.optimizer)
        self.step, self.steps_without_targets, self.seconds = 0, 0, 0.0
        state = self._restore(checkpoint) if checkpoint else LoaderState()
        self.loader: PackLoader = build_dataloader(recipe.data, self.processor, seed=recipe.train.seed, state=state)
        self.last_checkpoint = checkpoint
        self.heldout = open_sources(recipe.data.heldout)
        for first in first_samples([*self.loader.sources, *self.heldout], self.processor).values():
            if isinstance(first, UserError):
                raise first
        self.meter, self.stopwatch = LossMeter(), Stopwatch()
        self._started = started - self.seconds

    def fit(self) -> RunSummary:
        """Train to the last step (or Ctrl-C), save, evaluate.

        Raises:
            NonFiniteError: a loss or gradient is not finite.
            UserError: data turned out to be unusable.
        """
        train = self.recipe.train
        self._open_folder()
        show_components(component_rows(self.model, self.ops))
        if self.compiled is not None:
            console.print(f"compiled block by block: {len(self.compiled.names)} blocks of the foundation")
        metrics = MetricsFile(self.folder / "metrics.jsonl", resume_step=self.step)
        self.stopwatch = Stopwatch()
        with (
            _settled_objects_uncollected(),
            Interrupt() as interrupt,
            StepProgress(train.steps, self.step) as progress,
            contextlib.closing(iter(self.loader)) as packs,
        ):
            while self.step < train.steps and not interrupt.requested:
                waiting = time.perf_counter()
                batch = [next(packs) for _ in range(train.micro_batches)]
                waited = time.perf_counter() - waiting
                loss, norm = self.train_step(batch)
                self.stopwatch.add(sum(pack.num_tokens for pack in batch), waited)
                progress.update(self.step)
                if self.step % train.log_every == 0 or self.step == train.steps:
                    line = self._metrics(loss, norm)
                    metrics.write(line)
                    progress.update(self.step, _status(line))
                if train.save_every and self.step % train.save_every == 0 and self.step < train.steps:
                    self._save()
            checkpoint = self._save()
        if interrupt.requested:
            console.print(
                f"interrupted at step {self.step}; saved {checkpoint}; `omnitrain run ... --resume` continues"
            )
            return RunSummary(self.step, True, checkpoint, {})
        return RunSummary(self.step, False, checkpoint, self._evaluate())

    def train_step(self, batch: list[Pack]) -> tuple[float, float]:
        """One optimizer step over ``batch``.

        Every head's loss is its sum over the whole batch, divided once by the batch's number of predicted tokens: how
        samples are spread over packs does not show.

        Returns:
            The total loss and the gradient norm before clipping.

        Raises:
            NonFiniteError: before the update; the message names the samples.
        """
        settings, weights = self.recipe.train.optimizer, self.recipe.train.loss_weights
        counts = _total_counts(batch)
        total = torch.zeros((), device=self.device)
        for pack in batch:
            pack = pack.to(self.device)
            losses = self.model(pack).losses
            terms = [weights.get(n, 1.0) * term.sum / counts[n] for n, term in losses.items() if counts[n]]
            if terms:
                loss = torch.stack(terms).sum()
                loss.backward()
                total += loss.detach()
            self.meter.add(pack, losses)
        if self.compiled is not None:
            self.compiled.check()
        norm = clip_gradients(self.model.parameters(), settings.max_grad_norm)
        loss_value, norm_value = total.item(), norm.item()
        if not (torch.isfinite(total) and torch.isfinite(norm)):
            ids = [sample for pack in batch for sample in pack.info.ids]
            raise NonFiniteError(f"step {self.step + 1}: loss {loss_value}, gradient norm {norm_value}; samples {ids}")
        if sum(counts.values()):
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(self.step, self.recipe.train.steps, settings)
            self.optimizer.step()
        else:
            self.steps_without_targets += 1
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss_value, norm_value

    def _metrics(self, loss: float, norm: float) -> dict[str, Any]:
        return {
            "step": self.step,
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            **self.meter.read(),
            **self.stopwatch.read(),
            "memory_mb": peak_memory_mb(self.device),
            "rejected": len(self.loader.rejected),
            "steps_without_targets": self.steps_without_targets,
            "recompiles": self.compiled.recompiles if self.compiled else 0,
        }

    def _compiled(self) -> CompiledBlocks | None:
        settings = self.recipe.train.compile
        if not settings.enabled:
            return None
        return compile_blocks(self.model.foundation, max_recompiles=settings.max_recompiles)

    def _checkpoint_to_resume(self) -> Path:
        checkpoint = self.store.latest()
        begun = Recipe.load(str(self.folder / "recipe.yaml"))
        same_ops = {"ops": self.recipe.model.ops}
        if begun.model.model_copy(update=same_ops) != self.recipe.model:
            raise UserError(
                f"{self.folder} was begun with another `model` than this recipe's; resume it with its own recipe "
                f"({self.folder / 'recipe.yaml'}), or start a new run from it: model.checkpoint={self.folder}"
            )
        return checkpoint

    def _save(self) -> Path:
        if self.last_checkpoint is None or self.last_checkpoint != self.store.folder_of(self.step):
            self.seconds = time.perf_counter() - self._started
            self.last_checkpoint = self.store.save(self.step, self._write)
            self._list_rejected(self.loader.rejected.values())
        return self.last_checkpoint

    def _list_rejected(self, rejected: Iterable[Rejected]) -> None:
        """Write ``rejected.jsonl``: rows that were skipped, and why."""
        lines = [json.dumps(asdict(row)) + "\n" for row in rejected]
        (self.folder / "rejected.jsonl").write_text("".join(lines))

    def _write(self, folder: Path) -> None:
        self.model.save_pretrained(folder)
        self.processor.save_pretrained(folder)
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "loader": {"next_index": self.loader.state().next_index, "held": list(self.loader.state().held)},
            "steps_without_targets": self.steps_without_targets,
            "rejected": [asdict(row) for row in self.loader.rejected.values()],
            "optimizer": self.optimizer.state_dict(),
            "trainable": self._trainable(),
            "rng": torch.get_rng_state(),
        }
        torch.save(state, folder / "trainer.pt")

    def _trainable(self) -> list[str]:
        """Names of the trained parameters, in the order in which the optimizer's state lists them."""
        return [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]

    def _restore(self, checkpoint: Path) -> LoaderState:
        state = torch.load(checkpoint / "trainer.pt", weights_only=True)
        self.step, self.seconds = state["step"], state["seconds"]
        self.steps_without_targets = state["steps_without_targets"]
        if state["trainable"] != self._trainable():
            changed = sorted(set(state["trainable"]) ^ set(self._trainable())) or "their order"
            raise UserError(f"{checkpoint}: other parameters trained than those of this recipe: {changed}")
        settings = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, wanted in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(wanted)
        torch.set_rng_state(state["rng"])
        rejected = tuple(Rejected(**row) for row in state["rejected"])
        return LoaderState(state["loader"]["next_index"], tuple(state["loader"]["held"]), rejected)

    def _open_folder(self) -> None:
        """Make the run's folder. A new run moves an older one aside instead of mixing with it."""
        if not self.resumed and (self.folder / "recipe.yaml").is_file():
            aside = next(p for n in count(1) if not (p := self.folder.with_name(f"{self.folder.name}.old{n}")).exists())
            self.folder.rename(aside)
            console.print(f"{self.folder} held an earlier run; it is now {aside}")
        self.folder.mkdir(parents=True, exist_ok=True)
        save_recipe(self.recipe, self.folder / "recipe.yaml")

    def _evaluate(self) -> dict[str, float]:
        if self.recipe.evaluation is None:
            return {}
        eager = self.compiled.paused() if self.compiled else contextlib.nullcontext()
        with console.status("evaluation") as status, eager:
            result = evaluate(self.model, self.processor, self.heldout, self.recipe, status.update)
        scores = result.scores | {"seconds": time.perf_counter() - self._started}
        (self.folder / "eval.json").write_text(json.dumps(scores | {"losses": result.losses}, indent=2) + "\n")
        page = save_samples(result.answers, self.folder / "samples", self.recipe.evaluation.saved_samples)
        show_scores(scores, title=f"{len(result.answers)} held-out answers")
        skipped = [*self.loader.rejected.values(), *result.rejected]
        self._list_rejected(skipped)
        console.print(f"scores: {self.folder / 'eval.json'}\nsamples: {page}")
        if skipped:
            console.print(f"rows skipped: {len(skipped)}, listed in {self.folder / 'rejected.jsonl'}")
        return scores


def _require_writable(folder: Path) -> None:
    """Refuse an output folder that cannot be made, or that holds something else than a run.

    Raises:
        UserError: says which folder is in the way.
    """
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "recipe.yaml").is_file():
        raise UserError(f"output_dir: {str(folder)!r} holds files and no run (no recipe.yaml); name a new folder")
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"output_dir: {str(folder)!r} cannot be written: {existing} is no folder that we may write to")


@contextlib.contextmanager
def _settled_objects_uncollected() -> Iterator[None]:
    """Imports and models are half a million objects; the garbage collector need not walk them during training."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _total_counts(batch: list[Pack]) -> dict[str, int]:
    """Predicted tokens per head over all packs of a step."""
    totals: dict[str, int] = {}
    for pack in batch:
        for name, number in pack.loss_counts().items():
            totals[name] = totals.get(name, 0) + number
    return totals


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UserError(f"train.device: {name!r} is no device; expected auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"train.device: {name!r} asked for, and torch {torch.__version__} finds no CUDA device")
    return device


def _status(line: dict[str, Any]) -> str:
    heads = "  ".join(f"{name} {head['loss']:.3f}" for name, head in line["heads"].items() if head["tokens"])
    return f"loss {line['loss']:.3f}  {heads}  {line['tokens_per_second']:,.0f} tokens/s"

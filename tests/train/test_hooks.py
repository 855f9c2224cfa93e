"""Callbacks, losses and metrics of the user's own, and early stopping."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pydantic import ValidationError

from omnitrain.errors import UserError
from omnitrain.ops.loss.cross_entropy import linear_cross_entropy
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.recipe import Recipe
from omnitrain.train.callbacks import Callback, CallbackError
from omnitrain.train.metrics.meter import StopWatcher
from omnitrain.train.run_state.run_folder import RunFolder
from omnitrain.train.trainer import Trainer
from omnitrain.train.verbs.check import check_recipe
from tests.tiny import tiny_recipe
from tests.train.test_faults import after_step

EVERY_STEP = ["evaluation={loss_every: 1, max_new_tokens: 1}", "train.early_stopping.metric=heldout.loss"]


class Recorder(Callback):
    """Writes down what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def on_start(self, trainer: Trainer) -> None:
        self.calls.append(("start", trainer.step))

    def on_step(self, trainer: Trainer, loss: float, grad_norm: float) -> None:
        self.calls.append(("step", trainer.step))

    def on_log(self, trainer: Trainer, line: dict[str, Any]) -> None:
        line["twice"] = 2 * trainer.step

    def on_evaluate(self, trainer: Trainer, result: Any) -> None:
        self.calls.append(("evaluate", len(result.answers)))

    def on_save(self, trainer: Trainer, folder: Path) -> None:
        self.calls.append(("save", folder.name))

    def on_end(self, trainer: Trainer, summary: Any) -> None:
        self.calls.append(("end", summary.step))


class Failing(Callback):
    """Raises on the last rank after the second step."""

    def on_step(self, trainer: Trainer, loss: float, grad_norm: float) -> None:
        if trainer.step == 2 and trainer.ranks.peers.rank == trainer.ranks.peers.size - 1:
            raise KeyError("no such curve")


class Stopping(Callback):
    """The last rank has enough after two steps."""

    def on_step(self, trainer: Trainer, loss: float, grad_norm: float) -> None:
        if trainer.step == 2 and trainer.ranks.peers.rank == trainer.ranks.peers.size - 1:
            trainer.stop("enough")


class Misspelt(Callback):
    def on_stepp(self, trainer: Trainer) -> None: ...


class Unwritable(Callback):
    def on_log(self, trainer: Trainer, line: dict[str, Any]) -> None:
        line["norm"] = torch.ones(())


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def recipe(folder: Path, *overrides: str, **settings: Any) -> Recipe:
    return Recipe.load(str(tiny_recipe(folder, text_only=True, **settings)), list(overrides))


def test_callbacks_are_called_in_the_order_of_the_run_and_add_to_its_metrics(tmp_path: Path) -> None:
    recorder = Recorder()
    settings = recipe(tmp_path, "evaluation.loss_every=2", evaluated=True, steps=3, save={"every": 2}, log_every=1)
    Trainer(settings, callbacks=[recorder]).fit()
    steps = [("step", 1), ("step", 2), ("evaluate", 0), ("save", "step-00000002"), ("step", 3)]
    assert recorder.calls == [("start", 0), *steps, ("save", "step-00000003"), ("evaluate", 28), ("end", 3)]
    assert [line["twice"] for line in lines(tmp_path / "run")] == [2, 4, 6]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([f"{__file__}:Misspelt"], r"Misspelt.on_stepp: no such event; did you mean `on_step`\?"),
        ([f"{__file__}:lines"], "cannot be called without arguments"),
        ([f"{__file__}:missing"], "cannot be loaded"),
        (["builtins:dict"], "found a dict; expected an object of a class that inherits from omnitrain.Callback"),
    ],
)
def test_a_callback_that_cannot_be_called_is_refused_before_the_run(
    tmp_path: Path, names: list[str], message: str
) -> None:
    settings = recipe(tmp_path, f"train.callbacks={json.dumps(names)}")
    with pytest.raises(UserError, match=f"train.callbacks: .*{message}"):
        Trainer(settings)
    assert any(message.split("(")[0][:20] in problem for problem in check_recipe(settings)), check_recipe(settings)
    assert not (tmp_path / "run").exists()


def end_of(path: Path, overrides: list[str]) -> tuple[str, int]:
    """How a rank's run ends, and after which step."""
    trainer = Trainer(Recipe.load(str(path), overrides))
    try:
        return str(trainer.fit().stopped), trainer.step
    except CallbackError as error:
        cause = type(error.__cause__).__name__
        return f"{error}|{cause}", trainer.step


def test_a_callback_that_raises_on_one_rank_ends_all_with_its_name_and_a_checkpoint(
    ranks: RankPool, tmp_path: Path
) -> None:
    path = tiny_recipe(tmp_path, text_only=True, packs_per_step=2, steps=9)
    overrides = [f"train.callbacks=['{__file__}:Failing']"]
    (first, one), (second, two) = ranks.run(end_of, path, overrides, timeout_s=60, world=2)
    told, cause = second.split("|")
    assert (one, two, cause) == (2, 2, "KeyError") and first.split("|") == [told, "NoneType"]
    failed, saved = told.splitlines()
    assert failed.startswith("rank 1: the callback Failing.on_step failed after step 2: KeyError: 'no such curve' (")
    assert failed.endswith(")") and f"{Path(__file__).name}, line " in failed
    assert saved == f"  the steps so far are saved in {tmp_path / 'run' / 'checkpoints' / 'step-00000002'}"
    resumed = [f"train.callbacks=['{__file__}:Recorder']", "train.steps=3"]
    assert Trainer(Recipe.load(str(path), resumed), resume=True).fit().step == 3


def test_a_number_that_cannot_be_written_is_told_with_the_callback_that_added_it(tmp_path: Path) -> None:
    with pytest.raises(CallbackError, match=r"Unwritable.on_log failed after step 1: TypeError: .*Tensor is not JSON"):
        Trainer(recipe(tmp_path), callbacks=[Unwritable()]).fit()


def test_a_callback_on_one_rank_stops_all_at_one_step(ranks: RankPool, tmp_path: Path) -> None:
    path = tiny_recipe(tmp_path, text_only=True, packs_per_step=2, steps=9)
    overrides = [f"train.callbacks=['{__file__}:Stopping']"]
    assert ranks.run(end_of, path, overrides, timeout_s=60, world=2) == 2 * [("enough", 2)]


def message_of_others_than_rank_0(path: Path) -> str:
    callbacks = [Recorder()] if dist.get_rank() == 0 else []
    with pytest.raises(UserError) as error:
        Trainer(Recipe.load(str(path)), callbacks=callbacks)
    return str(error.value)


def test_ranks_with_different_callbacks_are_refused_instead_of_waiting_for_each_other(
    ranks: RankPool, tmp_path: Path
) -> None:
    path = tiny_recipe(tmp_path, text_only=True, packs_per_step=2)
    first, second = ranks.run(message_of_others_than_rank_0, path, timeout_s=60, world=2)
    assert "the ranks have different callbacks (this one: Recorder)" in first and "(this one: none)" in second


def test_a_stopped_run_is_evaluated_after_its_last_step(tmp_path: Path) -> None:
    """Its held-out loss, too, where only earlier steps measure it."""
    losses = []
    for every in (1, 2):
        evaluation = f"evaluation={{loss_every: {every}, max_new_tokens: 1, examples_per_source: 1}}"
        run = tmp_path / f"every_{every}"
        trainer = Trainer(recipe(tmp_path, evaluation, f"output_dir={run}", evaluated=True, steps=9, log_every=9))
        assert after_step(trainer, 3, partial(trainer.stop, "enough")).fit().step == 3
        losses.append(json.loads((run / "eval.json").read_text()))
    assert losses[0]["losses"] == losses[1]["losses"] and losses[0]["step"] == losses[1]["step"] == 3


def test_early_stopping_ends_all_ranks_at_one_step_and_the_run_is_finished(ranks: RankPool, tmp_path: Path) -> None:
    """With a rate of almost 0 nothing improves by 0.1."""
    path = tiny_recipe(tmp_path, text_only=True, evaluated=True, packs_per_step=2, steps=9)
    still = ["train.optimizer.learning_rate=1e-12", "train.early_stopping.min_delta=0.1"]
    overrides = [*EVERY_STEP, *still, "train.early_stopping.patience=2"]
    (first, one), (second, two) = ranks.run(end_of, path, overrides, timeout_s=60, world=2)
    assert (one, two) == (3, 3) and first == second
    assert first.startswith("heldout.loss has not improved in 2 measurements since ")
    again = Recipe.load(str(path), overrides)
    assert "3 of 9 steps are done (heldout.loss has not improved" in str(RunFolder(again).finished())
    assert Trainer(again, resume=True).fit().step == 3
    more = Recipe.load(str(path), [*EVERY_STEP, *still, "train.early_stopping.patience=4"])
    assert Trainer(more, resume=True).fit().step == 5 and len(lines(tmp_path / "run")) == 5


@pytest.mark.parametrize(
    ("mode", "values", "stops_at"),
    [("min", [3.0, 2.0, 2.5, 2.0], 4), ("max", [0.1, 0.1, 0.2, 0.1], None), ("min", [1.0, 0.95, 0.85, 0.83], None)],
)
def test_what_counts_as_an_improvement(mode: str, values: list[float], stops_at: int | None) -> None:
    settings = {"metric": "metrics.accuracy.text", "mode": mode, "patience": 2, "min_delta": 0.01}
    train = Recipe.model_fields["train"].annotation
    watcher = StopWatcher(train(early_stopping=settings).early_stopping)
    stops = []
    for step, value in enumerate(values, 1):
        watcher.add({"step": step, "metrics": {"accuracy": {"text": value}}})
        watcher.add({"step": step})
        stops += [step] if watcher.reason else []
    assert stops[:1] == ([stops_at] if stops_at else [])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.early_stopping.metric=heldout.loss"], r"needs `evaluation\.loss_every`"),
        (["train.early_stopping.metric=metrics.accuracy.text"], "`train.metrics` has no 'accuracy'"),
        (["train.early_stopping.metric=heads.txt.loss"], "early_stopping.metric: unknown head; did you mean `text`"),
        (["train.early_stopping.metric=lr"], r"expected `loss`, `heads\.HEAD\.loss` or `metrics\.NAME\.HEAD`"),
        (["train.losses={txt: 'my:loss'}"], "train.losses.txt: unknown name; did you mean `text`"),
    ],
)
def test_a_metric_or_head_that_the_run_does_not_have_is_refused(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        recipe(tmp_path, *overrides)


def smoothed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, labels, reduction="none", label_smoothing=0.1)


def plain(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, labels, reduction="none")


def accuracy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (logits.argmax(-1) == labels).float()


def mean(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, labels)


@pytest.mark.parametrize("num_ignored", [0, 3])
def test_a_loss_of_the_users_own_has_the_gradients_of_autograd_in_any_chunks(num_ignored: int) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(11, 6, requires_grad=True), torch.randn(9, 6, requires_grad=True)
    labels = torch.randint(0, 9, (11,))
    labels[:num_ignored] = -100
    kept = labels != -100
    expected = smoothed(hidden[kept] @ weight.t(), labels[kept])
    wanted = torch.autograd.grad(expected.sum(), (hidden, weight))
    term = linear_cross_entropy(
        hidden, weight, labels, function=smoothed, metrics={"accuracy": accuracy}, chunk_elements=27
    )
    torch.testing.assert_close(term.rows[kept], expected.detach())
    for got, want in zip(torch.autograd.grad(term.sum, (hidden, weight)), wanted, strict=True):
        torch.testing.assert_close(got, want)
    hits = accuracy(hidden @ weight.t(), labels) * kept
    torch.testing.assert_close(term.metrics["accuracy"], hits)
    with pytest.raises(UserError, match=r"mean returned shape \[\]; expected one value per label"):
        linear_cross_entropy(hidden, weight, labels, function=mean)


def test_the_losses_of_a_recipe_train_its_heads_and_its_metrics_are_means_over_tokens(tmp_path: Path) -> None:
    """Cross entropy, written by the user, is the built-in loss; functions are kept by their names."""
    path = tiny_recipe(tmp_path, evaluated=True, steps=2)
    own = Recipe.load(str(path), ["evaluation={loss_every: 2, max_new_tokens: 1, examples_per_source: 1}"])
    Trainer(own).fit()
    own.train.losses = {"text": plain, "image_decoder": plain}
    own.train.metrics = {"nats": plain, "accuracy": accuracy}
    assert own.train.losses["text"] == f"{__name__}:plain"
    Trainer(own).fit()
    for line, before in zip(lines(tmp_path / "run"), lines(tmp_path / "run.old1"), strict=True):
        assert line["loss"] == pytest.approx(before["loss"], rel=1e-5)
        for measured in [line, *([line["heldout"]] if "heldout" in line else [])]:
            losses = {name: head["loss"] for name, head in measured["heads"].items() if head["tokens"]}
            assert measured["metrics"]["nats"] == pytest.approx(losses, rel=1e-5)
            assert all(0 <= share <= 1 for share in measured["metrics"]["accuracy"].values())
    with pytest.raises(ValidationError, match="a recipe keeps the name of a function"):
        own.train.losses = {"text": lambda logits, labels: plain(logits, labels)}


def test_a_run_on_two_ranks_has_the_metrics_of_one_process(ranks: RankPool, tmp_path: Path) -> None:
    path = tiny_recipe(tmp_path, packs_per_step=2, steps=2, text_only=True)
    functions = [f"train.losses={{text: '{__name__}:smoothed'}}", f"train.metrics={{accuracy: '{__name__}:accuracy'}}"]
    Trainer(Recipe.load(str(path), [*functions, f"output_dir={tmp_path / 'one'}"])).fit()
    ranks.run(end_of, path, functions, timeout_s=60, world=2)
    for line, before in zip(lines(tmp_path / "run"), lines(tmp_path / "one"), strict=True):
        assert line["loss"] == pytest.approx(before["loss"], rel=1e-5) and not dist.is_initialized()
        assert line["metrics"]["accuracy"] == pytest.approx(before["metrics"]["accuracy"], rel=1e-5)

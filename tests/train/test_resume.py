from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from omnitrain.cli.main import app
from omnitrain.errors import TrainingError, UserError
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.generate import Answer, generate
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.step.media_dispatch import StepBatch
from omnitrain.report.svg import numbers_in
from omnitrain.train.metrics.console import console
from omnitrain.train.run_state import snapshot
from omnitrain.train.run_state.run_folder import RunFolder
from omnitrain.train.trainer import Trainer
from tests.tiny import tiny_recipe
from tests.train.test_trainer import load, losses, weights


def fail_on_interrupt_after(trainer: Trainer, step: int) -> None:
    """Send ourselves Ctrl-C at the end of ``step``."""
    inner = trainer.train_step

    def train_step(batch: StepBatch) -> Any:
        result = inner(batch)
        if trainer.step == step:
            os.kill(os.getpid(), signal.SIGINT)
        return result

    trainer.train_step = train_step


def test_a_run_that_ctrl_c_cut_resumes_as_if_never_cut(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, text_only=True, steps=8)
    Trainer(load(recipe, f"output_dir={tmp_path / 'whole'}")).fit()
    cut = Trainer(load(recipe))
    fail_on_interrupt_after(cut, 3)
    summary = cut.fit()
    assert summary.interrupted and summary.step == 3
    resumed = Trainer(load(recipe), resume=True)
    assert resumed.fit().step == 8
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    whole = weights(tmp_path / "whole")
    assert all(torch.equal(weight, whole[name]) for name, weight in weights(tmp_path / "run").items())


@pytest.mark.second
def test_a_line_over_steps_before_and_behind_a_resume_counts_all_of_them(tmp_path: Path) -> None:
    recipe = load(tiny_recipe(tmp_path, steps=4, save={"every": 2}, log_every=4))
    metrics = tmp_path / "run" / "metrics.jsonl"
    shutil.rmtree(Trainer(recipe).fit().checkpoint)
    whole = json.loads(metrics.read_text())
    Trainer(recipe, resume=True).fit()
    resumed = json.loads(metrics.read_text())
    for key in ("heads", "sources"):
        assert dict(numbers_in(resumed[key])) == pytest.approx(dict(numbers_in(whole[key])), rel=1e-12)
    assert len(whole["sources"]) == 7


@pytest.mark.parametrize("device", ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def test_a_run_with_dropout_resumes_exactly(tmp_path: Path, device: str) -> None:
    dropout = "model.foundation.config.attention_dropout=0.2"
    recipe = tiny_recipe(tmp_path, text_only=True, steps=6, save={"every": 3}, device=device)
    Trainer(load(recipe, dropout)).fit()
    whole = losses(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000006")
    torch.manual_seed(99)  # of every device
    Trainer(load(recipe, dropout), resume=True).fit()
    assert losses(tmp_path / "run") == whole


def test_a_run_of_rounded_weights_goes_on_without_a_plan_from_what_was_rounded(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, steps=2)
    rounded = Trainer(load(recipe, "parallel.default={precision: {param: bfloat16}, memory: {offload: [optimizer]}}"))
    rounded.fit()
    resumed = Trainer(load(recipe), resume=True)
    copies, weights = (
        [weight for group in optimizer.param_groups for weight in group["params"]]
        for optimizer in (rounded.optimizer.inner, resumed.optimizer)
    )
    assert len(weights) > 80 and all(torch.equal(a.to_local(), b) for a, b in zip(copies, weights, strict=True))


def test_sigterm_in_a_save_lets_it_finish_and_ends_the_run_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_recipe(tmp_path, text_only=True, steps=6, save={"every": 2})
    Trainer(load(path, f"output_dir={tmp_path / 'whole'}")).fit()
    write = snapshot.write_optimizer

    def terminated(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        write(*arguments)

    monkeypatch.setattr(snapshot, "write_optimizer", terminated)
    summary = Trainer(load(path)).fit()
    assert (summary.interrupted, summary.is_terminated, summary.step) == (True, True, 2)
    monkeypatch.undo()
    Trainer(load(path), resume="auto").fit()
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_resuming_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing to resume"):
        Trainer(load(tiny_recipe(tmp_path, text_only=True)), resume=True)


def test_a_recipe_that_would_make_another_run_of_it_is_refused_key_by_key(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, text_only=True)
    Trainer(load(recipe)).fit()
    changes = (
        "data.pack_tokens=128",
        "train.seed=3",
        "train.optimizer.eps=1e-5",
        "train.loss_weights={text: 2}",
    )
    with pytest.raises(UserError) as caught:
        Trainer(load(recipe, *changes), resume=True)
    assert str(caught.value).splitlines()[1:-1] == [
        "  data.pack_tokens: was 160, is 128",
        "  train.loss_weights.text: was unset, is 2.0",
        "  train.optimizer.eps: was 1e-08, is 1e-05",
        "  train.seed: was 0, is 3",
    ]
    assert "another output_dir" in str(caught.value)


def test_ctrl_c_in_the_evaluation_ends_it_behind_the_batch_and_resuming_evaluates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load(
        tiny_recipe(tmp_path, text_only=True, evaluated=True), "evaluation={batch_size: 4, max_new_tokens: 2}"
    )
    batches: list[int] = []

    def interrupted(model: Any, processor: Any, prompts: Any, **options: Any) -> list[Answer]:
        batches.append(len(prompts))
        os.kill(os.getpid(), signal.SIGINT)
        return generate(model, processor, prompts, **options)

    monkeypatch.setattr("omnitrain.train.evaluate.evaluate.generate", interrupted)
    summary = Trainer(recipe).fit()
    assert (summary.interrupted, summary.step, summary.scores, batches) == (True, 4, {}, [4])
    monkeypatch.undo()
    assert Trainer(recipe, resume=True).fit().scores["seconds"] > 0


def test_a_run_with_another_order_of_data_is_refused_before_its_model_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_recipe(tmp_path, text_only=True)
    Trainer(load(path, "train.steps=1")).fit()
    monkeypatch.setattr("omnitrain.data.loading.slots.ORDER_VERSION", 4)
    monkeypatch.setattr("omnitrain.train.trainer.prepare_model", None)
    with pytest.raises(UserError, match=r"the run began with version 3 of the order of data.*only version 4"):
        Trainer(load(path, "train.steps=2"), resume=True)


def test_resuming_a_finished_run_changes_nothing_and_says_so(tmp_path: Path) -> None:
    path = tiny_recipe(tmp_path, text_only=True, evaluated=True)
    fast = ["evaluation={batch_size: 28, max_new_tokens: 1}", "train.steps=1"]
    Trainer(load(path, *fast)).fit()
    files = {file: file.stat().st_mtime_ns for file in (tmp_path / "run").rglob("*")}
    told = f"{tmp_path / 'run'} is finished: 1 of 1 steps are done; nothing was changed"
    with console.capture() as printed:
        assert Trainer(load(path, *fast), resume=True).fit().step == 1
    assert printed.get().startswith(told)
    resumed = CliRunner().invoke(app, ["run", str(path), *fast, "--resume"])
    assert resumed.exit_code == 0 and told in resumed.output
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "run").rglob("*")} == files
    for more in (["evaluation.batch_size=7"], ["train.steps=2"]):
        assert RunFolder(load(path, *fast, *more)).finished() is None
    with pytest.raises(UserError, match="was started with another recipe"):
        RunFolder(load(path, *fast, "train.seed=9")).finished()
    scores = tmp_path / "run" / "eval.json"
    scores.write_text(scores.read_text()[:-9])  # killed while it was written: the evaluation is made again
    assert RunFolder(load(path, *fast)).finished() is None


def test_what_changes_neither_data_nor_updates_may_change_on_resume(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, text_only=True, evaluated=True, steps=4)
    Trainer(load(recipe)).fit()
    free = ("train.steps=5", "train.log_every=2", "train.save.every=1", "data.workers=1", "train.precision=fp32")
    free += ("data.heldout=[]", "evaluation=null")
    for told in (": 4 steps are done, 1 are left", "is finished: 5 of 5 steps are done"):
        with console.capture() as printed:
            assert Trainer(load(recipe, *free), resume=True).fit().step == 5
        assert told in " ".join(printed.get().split())


def test_another_recipe_is_told_before_a_checkpoint_is_read(tmp_path: Path) -> None:
    """Here, one that is damaged: reading it would be told first."""
    recipe = tiny_recipe(tmp_path, text_only=True)
    checkpoint = Trainer(load(recipe, "train.steps=1")).fit().checkpoint
    (checkpoint / "trainer.pt").write_bytes(b"")
    with pytest.raises(UserError, match=r"started with another recipe:\n  train.seed: was 0, is 1"):
        Trainer(load(recipe, "train.seed=1"), resume=True)
    with pytest.raises(UserError, match=r"is damaged: \['trainer.pt'\]"):
        Trainer(load(recipe), resume=True)


def test_data_that_grew_are_refused_on_resume(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, text_only=True, rows=28)
    Trainer(load(recipe)).fit()
    tiny_recipe(tmp_path, text_only=True, rows=35)
    with pytest.raises(UserError, match=r"data\.train\.0: had 28 rows, has 35"):
        Trainer(load(recipe), resume=True)


def test_steps_before_a_failure_of_the_data_are_saved_and_continued_exactly(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, text_only=True, steps=6, packs_per_step=2)
    Trainer(load(recipe, f"output_dir={tmp_path / 'whole'}")).fit()
    failing = Trainer(load(recipe))
    steps = iter(failing.loader)

    class FailsAfterThreeSteps:
        def __iter__(self) -> Iterator[StepBatch]:
            yield from islice(steps, 3)
            raise TrainingError("the data process ended")

        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

    inner = failing.loader
    failing.loader = FailsAfterThreeSteps()
    with pytest.raises(TrainingError, match="the data process ended"):
        failing.fit()
    assert failing.step == 3
    Trainer(load(recipe), resume=True).fit()
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_a_run_clears_what_a_crashed_save_left_in_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it asks for the space that was taken by it."""
    recipe = tiny_recipe(tmp_path, text_only=True, steps=2)
    left = [tmp_path / run / "checkpoints" / ".step-00000001.partial" for run in ("run", "other")]
    Trainer(load(recipe)).fit()
    for folder in left:
        folder.mkdir(parents=True)
    disk = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk._replace(free=0 if left[0].exists() else disk.free))
    Trainer(load(recipe, "train.steps=3"), resume=True).fit()
    assert [folder.exists() for folder in left] == [False, True]


FROZEN = "parallel.components.image_encoder.freeze=true"


@pytest.mark.second
def test_a_continued_run_of_adapters_is_the_uninterrupted_one_and_its_base_is_left_as_it_was(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, steps=2)
    plan = "parallel.components.foundation.lora={targets: [q_proj, v_proj], rank: 4}"
    whole = Trainer(load(recipe, plan, f"output_dir={tmp_path / 'whole'}"))
    before = {name: p.clone() for name, p in whole.model.foundation.named_parameters() if not p.requires_grad}
    finished = whole.fit().checkpoint
    half = load(recipe, plan, f"output_dir={tmp_path / 'half'}", "train.save.every=1")
    Trainer(half).fit()
    shutil.rmtree(tmp_path / "half" / "checkpoints" / finished.name)
    Trainer(half, resume=True).fit()
    models = [OmniModel.from_pretrained(tmp_path / run / "checkpoints" / finished.name) for run in ("whole", "half")]
    adapters = [
        load_file(tmp_path / run / "checkpoints" / finished.name / "adapters/foundation/adapter_model.safetensors")
        for run in ("whole", "half")
    ]
    for first, second in (adapters, [model.state_dict() for model in models]):
        assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert len(adapters[0]) == 2 * 2 * 2 and all(tensor.any() for tensor in adapters[0].values())
    with pytest.raises(
        UserError, match=r"\d+ differ, such as .*; resume with the `freeze` and `lora` that the run was started"
    ):
        Trainer(half.model_copy(update={"parallel": load(recipe, plan, FROZEN).parallel}), resume=True)
    with pytest.raises(
        UserError, match=r"started with another recipe:\n  parallel.components.foundation.lora.alpha: was"
    ):
        Trainer(load(recipe, f"output_dir={tmp_path / 'half'}"), resume=True)
    saved = dict(models[0].foundation.named_parameters())
    assert len(before) > 8 and all(torch.equal(weight.to_local(), saved[name]) for name, weight in before.items())
    loaded = build_omni_model(weights_path=str(finished))
    assert all(loaded.get_parameter(name).any() for name in loaded.adapter_names) and len(loaded.adapter_names) == 8

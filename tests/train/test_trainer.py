from __future__ import annotations

import gc
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from omnitrain.errors import TrainingError, UserError
from omnitrain.models.omni.generate import Answer
from omnitrain.models.omni.model import OmniModel
from omnitrain.models.omni.summary import component_rows
from omnitrain.ops.compile.blocks import compile_blocks
from omnitrain.parallel.step.media_dispatch import StepBatch
from omnitrain.parallel.step.plan import step_planner
from omnitrain.recipe import Recipe
from omnitrain.report.svg import numbers_in
from omnitrain.train import saves
from omnitrain.train.evaluate import evaluate
from omnitrain.train.evaluate.evaluate import Answered
from omnitrain.train.metrics.console import console
from omnitrain.train.prepare import is_compiled
from omnitrain.train.run_state import snapshot
from omnitrain.train.run_state.save import checkpoint_bytes
from omnitrain.train.trainer import NonFiniteError, Trainer
from omnitrain.train.verbs.answer import Answerer
from tests.tiny import TASKS, png, tiny_recipe, tiny_row, write_parquet


def load(path: Path, *overrides: str) -> Recipe:
    return Recipe.load(str(path), list(overrides))


def test_the_name_of_a_recipe_is_no_recipe() -> None:
    with pytest.raises(UserError, match=r"recipe: found a str; expected a Recipe, as Recipe.load\(NAME\) returns"):
        Trainer("quickstart")


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights(run: Path) -> dict[str, torch.Tensor]:
    checkpoint = max((run / "checkpoints").glob("step-*"))
    return dict(OmniModel.from_pretrained(checkpoint).state_dict())


@pytest.mark.second
def test_two_runs_with_one_seed_give_the_same_losses_and_another_seed_others(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, text_only=True)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        Trainer(load(recipe, f"output_dir={tmp_path / name}", f"train.seed={seed}")).fit()
    assert losses(tmp_path / "a") == losses(tmp_path / "b") != losses(tmp_path / "c")


def test_a_run_leaves_frozen_what_its_process_has_frozen(tmp_path: Path) -> None:
    """The session of tests freezes its imports."""
    frozen = gc.get_freeze_count()
    Trainer(load(tiny_recipe(tmp_path, text_only=True), "train.steps=1")).fit()
    assert gc.get_freeze_count() == pytest.approx(frozen, rel=0.01) and frozen > 100_000


def test_training_lowers_the_loss(tmp_path: Path) -> None:
    Trainer(load(tiny_recipe(tmp_path, steps=30), "train.optimizer.learning_rate=1e-2")).fit()
    seen = losses(tmp_path / "run")
    assert sum(seen[-3:]) < 0.8 * sum(seen[:3])


def test_the_saved_recipe_runs_again_as_it_is(tmp_path: Path) -> None:
    Trainer(load(tiny_recipe(tmp_path, text_only=True), "train.steps=2")).fit()
    saved = load(tmp_path / "run" / "recipe.yaml")
    assert saved.train.steps == 2
    Trainer(saved).fit()
    assert losses(tmp_path / "run") == losses(tmp_path / "run.old1")


def test_metrics_split_losses_and_tokens_by_head_and_source(tmp_path: Path) -> None:
    Trainer(load(tiny_recipe(tmp_path, log_every=4))).fit()
    (line,) = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for head, total in line["heads"].items():
        parts = [source[head] for source in line["sources"].values() if head in source]
        assert sum(part["tokens"] for part in parts) == total["tokens"] > 0
        mean = sum(part["loss"] * part["tokens"] for part in parts) / total["tokens"]
        assert abs(mean - total["loss"]) < 1e-4
    assert set(line["sources"]["image_to_speech"]) == {"text", "audio_decoder"}
    assert line["tokens_per_second"] > 0 and 0 <= line["data_wait"] <= 1 and line["grad_norm"] > 0


@pytest.mark.second
def test_ops_and_compile_are_chosen_in_the_recipe_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omnitrain.train.prepare.compile_blocks", partial(compile_blocks, backend="eager"))
    plain, one_block = tiny_recipe(tmp_path, steps=3), "model.foundation.config.num_hidden_layers=1"
    ops = ["model.ops.rms_norm=torch", "model.ops.unread_rows=torch"]
    Trainer(load(plain, f"output_dir={tmp_path / 'plain'}", one_block, *ops)).fit()
    trainer = Trainer(load(plain, one_block, "model.ops.patch_embed=torch", "train.compile=true"))
    trainer.fit()
    ops = {row.name: row.ops for row in component_rows(trainer.model, trainer.ops)}
    assert "rms_norm: fused (5)" in ops["foundation"] and "patch_embed" not in ops["image_encoder"]
    assert "unread_rows: skip (6)" in ops["foundation"]
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["recompiles"] == trainer.compiled.recompiles
    # Behind inserted media the first block gets a view, and torch compiles views apart.
    assert max(trainer.compiled.compilations.values()) <= 2
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("device", "overrides", "compiles"),
    [
        ("cpu", [], False),
        ("cuda", [], True),
        ("cuda", ["parallel.default.memory.recompute=full", "parallel.default.memory.offload=[activations]"], True),
        ("cuda", ["parallel.default.memory.offload=[activations]"], False),
        ("cuda", ["parallel.components.foundation.compile=false"], False),
        ("cuda", ["parallel.components.foundation.pp=2", "parallel.components.foundation.schedule.kind=zbv"], False),
    ],
)
def test_auto_compiles_on_cuda_where_the_plan_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, overrides: list[str], compiles: bool
) -> None:
    monkeypatch.setattr("omnitrain.train.prepare.compiler_missing", lambda _: None)
    recipe = load(tiny_recipe(tmp_path), "train.compile=auto", *overrides)
    assert is_compiled(recipe, torch.device(device)) is compiles


@pytest.mark.second
def test_leaving_out_rows_that_no_head_reads_changes_no_loss(tmp_path: Path) -> None:
    plain = tiny_recipe(tmp_path, steps=3)
    Trainer(load(plain, f"output_dir={tmp_path / 'plain'}", "model.ops.unread_rows=torch")).fit()
    Trainer(load(plain)).fit()
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)


def test_a_step_without_targets_changes_nothing_and_is_counted(tmp_path: Path) -> None:
    trainer = Trainer(load(tiny_recipe(tmp_path)))
    batch = next(iter(trainer.loader))
    none = torch.zeros(0, dtype=torch.long)
    empty = replace(batch.packs[0], text_rows=none, text_labels=none, targets={})
    trainer.train_step(batch)
    before = {n: p.clone() for n, p in trainer.model.named_parameters()}
    assert trainer.train_step(step_planner(trainer.model, trainer.ranks.rendezvous)([empty])) == (0.0, 0.0)
    assert all(torch.equal(p, before[n]) for n, p in trainer.model.named_parameters())
    assert trainer.measures.steps_without_targets == 1


def test_data_in_which_nobody_answers_end_the_run(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    asked = tiny_row("text", 0)
    rows = [replace(asked, messages=asked.messages[:-1])] * 4
    write_parquet(tmp_path / "train.parquet", rows)
    with pytest.raises(UserError, match=r"all of 4 rows were rejected.*nothing of the row is trained"):
        Trainer(load(recipe, "model.encoders={}", "model.decoders={}")).fit()


def test_a_non_finite_loss_stops_before_the_update_and_names_the_samples(tmp_path: Path) -> None:
    trainer = Trainer(load(tiny_recipe(tmp_path)))
    batch = next(iter(trainer.loader))
    with torch.no_grad():
        trainer.model.foundation.model.norm.weight[0] = float("nan")
    before = trainer.model.image_encoder.projector.layers[1].weight.clone()
    with pytest.raises(NonFiniteError, match=batch.packs[0].info.ids[0]):
        trainer.train_step(batch)
    assert torch.equal(before, trainer.model.image_encoder.projector.layers[1].weight) and trainer.step == 0


def spoil_a_sample(trainer: Trainer, step: int) -> list[str]:
    """Make hidden states of one sample of ``step`` (from 1) infinite, though the weights are sound; return its name."""
    names: list[str] = []
    lengths: list[int] = []
    inner = trainer.train_step

    def train_step(batch: StepBatch) -> Any:
        names[:], lengths[:] = batch.packs[0].info.ids[:1], batch.packs[0].info.lengths[:1]
        return inner(batch)

    def spoil(_: Any, __: Any, hidden: torch.Tensor) -> torch.Tensor | None:
        factors = torch.ones(hidden.size(1), 1)
        factors[: lengths[0]] = float("inf")
        return hidden * factors if trainer.step == step - 1 else None

    trainer.train_step = train_step
    trainer.model.foundation.model.norm.register_forward_hook(spoil)
    return names


@pytest.mark.second
def test_steps_before_a_nan_are_saved_and_continued_exactly(tmp_path: Path) -> None:
    """The broken step leaves nothing in the sums of losses that the next line of metrics shows."""
    recipe = load(tiny_recipe(tmp_path, text_only=True, steps=6, log_every=2))
    Trainer(recipe.model_copy(update={"output_dir": str(tmp_path / "whole")})).fit()
    broken = Trainer(recipe)
    spoilt = spoil_a_sample(broken, 4)
    with pytest.raises(NonFiniteError) as caught:
        broken.fit()
    lines = str(caught.value).splitlines()
    assert lines[0] == "step 4: the loss is nan and the gradient norm nan; this step changed no weight"
    assert lines[1] == f"  loss of text not finite in the samples {spoilt[0]}"
    assert lines[2].startswith(f"  it began in forward of foundation, micro-batch 0: samples {spoilt[0]}, text/")
    assert lines[5:7] == [
        "  - a lower train.optimizer.learning_rate (it is 0.0003), or more train.optimizer.warmup_steps (it is 1)",
        "  - a lower train.optimizer.max_grad_norm (it is 1)",
    ]
    run = tmp_path / "run"
    assert lines[7] == f"  the steps before it are saved in {run / 'checkpoints' / 'step-00000003'}"
    assert lines[8].endswith(f"model.checkpoint={run} and another output_dir")
    assert Trainer(recipe, resume=True).fit().step == 6
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    heads = [
        [json.loads(line)["heads"] for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("run", "whole")
    ]
    assert dict(numbers_in(dict(enumerate(heads[0])))) == pytest.approx(dict(numbers_in(dict(enumerate(heads[1])))))


def test_a_full_disk_hides_neither_a_nan_nor_failing_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(snapshot, "write_optimizer", full)
    trainer = Trainer(load(tiny_recipe(tmp_path, text_only=True)))
    spoil_a_sample(trainer, 2)
    with pytest.raises(NonFiniteError) as caught:
        trainer.fit()
    lines = str(caught.value).splitlines()
    assert lines[0] == "step 2: the loss is nan and the gradient norm nan; this step changed no weight"
    unsaved = rf"the steps before it could not be saved: {tmp_path}/run/checkpoints/step-00000001 cannot be written "
    unsaved += r"\(.*No space left on device; [\d.,]+ [MG]iB are free there\); .*; no checkpoint exists"
    assert re.fullmatch(f"  {unsaved}", lines[-1])

    def ends() -> Iterator[StepBatch]:
        raise TrainingError("the data process ended")
        yield

    with pytest.raises(TrainingError, match=r"^the data process ended$"):
        trainer._next_batch(ends())
    assert re.search(f"the data failed at step 2; {unsaved}\n", capsys.readouterr().out)


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    trainer = Trainer(load(tiny_recipe(tmp_path, text_only=True, save={"every": 1})))
    trainer.optimizer.register_step_post_hook(
        lambda *_: trainer.model.foundation.model.norm.weight.data.fill_(float("nan")) if trainer.step == 1 else None
    )
    with pytest.raises(NonFiniteError) as caught:
        trainer.fit()
    told = "nothing is saved, because the weights are not finite (1: foundation.model.norm.weight, ...)"
    assert str(caught.value).splitlines()[-1].strip() == f"{told}; the last checkpoint is {trainer.last_checkpoint}"


def test_the_loss_of_a_line_is_of_the_same_steps_as_the_losses_of_its_heads(tmp_path: Path) -> None:
    """With one head both are the same number."""
    path = tiny_recipe(tmp_path, steps=4, log_every=4)
    write_parquet(tmp_path / "train.parquet", [tiny_row("text", seed) for seed in range(28)])
    Trainer(load(path, "model.encoders={}", "model.decoders={}")).fit()
    (line,) = (json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert line["loss"] == pytest.approx(line["heads"]["text"]["loss"], rel=1e-6)


@pytest.mark.parametrize("checkpoints_that_fit", [1, 2])
def test_a_run_saves_every_ten_minutes_and_leaves_space_for_its_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoints_that_fit: int
) -> None:
    """A step takes 400 s here."""
    trainer = Trainer(load(tiny_recipe(tmp_path, text_only=True, steps=5, save={"every": "auto", "keep_last": 9})))
    monkeypatch.setattr(saves, "time", SimpleNamespace(monotonic=lambda: 400.0 * trainer.step))
    space, disk = checkpoints_that_fit * checkpoint_bytes(trainer.model), shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk._replace(free=space))
    with console.capture() as printed:
        trainer.fit()
    saved = [2, 4, 5] if checkpoints_that_fit == 2 else [5]
    assert [int(path.name[5:]) for path in sorted((tmp_path / "run" / "checkpoints").iterdir())] == saved
    told = " ".join(printed.get().split())
    assert ("step 2 is not saved, because the disk" in told) == (checkpoints_that_fit == 1)


@pytest.mark.second
def test_the_checkpoint_with_the_lowest_held_out_loss_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run compares with the checkpoints of earlier starts."""
    losses = iter([5.0, 1.0, 3.0, 2.0, 4.0, 1.5])

    def scripted(*_: Any) -> dict[str, Any]:
        return {"heads": {"text": {"loss": next(losses), "tokens": 1}}, "sources": {}}

    monkeypatch.setattr("omnitrain.train.evaluate.evaluate.heldout_loss", scripted)
    path = tiny_recipe(tmp_path, evaluated=True, text_only=True, steps=4, save={"every": 1, "keep_last": 1})
    settings = ["train.save.keep_best=heldout.loss", "evaluation={max_new_tokens: 1, loss_every: 1}"]
    Trainer(load(path, *settings)).fit()
    Trainer(load(path, *settings, "train.steps=6"), resume=True).fit()
    assert [folder.name for folder in sorted((tmp_path / "run" / "checkpoints").iterdir())] == [
        "step-00000002",
        "step-00000006",
    ]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.save.keep_best=grad_norm"], r"expected `loss`, `heads\.HEAD\.loss`"),
        (["train.save.keep_best=heads.txt.loss"], "train.save.keep_best: unknown head; did you mean `text`"),
        (["train.save.keep_best=heldout.loss"], r"needs `evaluation\.loss_every`"),
        (["train.save.keep_best=loss", "train.log_every=2", "train.save.every=3"], "set it to a multiple of 2"),
    ],
)
def test_a_metric_that_no_checkpoint_has_is_refused(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(tiny_recipe(tmp_path), *overrides)


def test_frozen_weights_stay_and_all_others_move(tmp_path: Path) -> None:
    trainer = Trainer(load(tiny_recipe(tmp_path), "model.freeze=[image_encoder]"))
    before = {n: p.clone() for n, p in trainer.model.named_parameters()}
    trainer.fit()
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, before[name]) == (not parameter.requires_grad), name
    assert not any(p.requires_grad for p in trainer.model.image_encoder.parameters())


def score(answers: list[Answered]) -> dict[str, float]:
    return {"answers": float(len(answers)), "sources": float(len({a.row.source for a in answers}))}


def test_evaluation_scores_answers_and_writes_samples(tmp_path: Path) -> None:
    recipe = load(tiny_recipe(tmp_path))
    evaluation = {"scorer": f"{__file__}:score", "examples_per_source": 2, "max_new_tokens": 4, "saved_samples": 1}
    tree = recipe.model_dump() | {"evaluation": evaluation}
    tree["data"]["heldout"] = tree["data"]["train"]
    summary = Trainer(Recipe.model_validate(tree)).fit()
    written = json.loads((tmp_path / "run" / "eval.json").read_text())
    assert written["answers"] == 14 and written["sources"] == 7 and written["seconds"] > 0
    assert summary.scores["answers"] == 14 and "text" in written["losses"]["heads"]
    page = (tmp_path / "run" / "samples" / "samples.md").read_text()
    assert page.count("## ") == 7 and "Asked (`image_to_text/1`): <img" in page
    assert (tmp_path / "run" / "samples" / "video_to_text_1_prompt_0.webp").is_file()


@pytest.mark.second
def test_held_out_losses_on_the_way_change_nothing_of_the_training(tmp_path: Path) -> None:
    plain = load(
        tiny_recipe(tmp_path, evaluated=True, text_only=True),
        f"output_dir={tmp_path / 'plain'}",
        "evaluation={max_new_tokens: 1}",
    )
    Trainer(plain).fit()
    recipe = load(
        tiny_recipe(tmp_path, evaluated=True, text_only=True),
        "evaluation={max_new_tokens: 1, loss_every: 3}",
        "train.log_every=2",
    )
    Trainer(recipe).fit()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], "heldout" in line) for line in lines] == [(2, False), (3, True), (4, False)]
    losses = json.loads((tmp_path / "run" / "eval.json").read_text())["losses"]
    assert lines[1]["heldout"].keys() == losses.keys()
    assert lines[1]["heldout"]["heads"]["text"]["tokens"] == losses["heads"]["text"]["tokens"] > 0
    assert lines[1]["heldout"]["heads"]["text"]["loss"] != losses["heads"]["text"]["loss"]
    one, other = weights(tmp_path / "plain"), weights(tmp_path / "run")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_held_out_rows_are_packed_once_and_no_step_is_measured_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()

    def counting(name: str) -> None:
        function = getattr(evaluate, name)
        monkeypatch.setattr(evaluate, name, lambda *a, **k: [calls.update([name]), function(*a, **k)][1])

    counting("pack_all")
    counting("heldout_loss")
    Trainer(
        load(tiny_recipe(tmp_path, text_only=True, evaluated=True), "evaluation={max_new_tokens: 1, loss_every: 2}")
    ).fit()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "heldout" in line] == [2, 4]
    assert json.loads((tmp_path / "run" / "eval.json").read_text())["losses"] == lines[-1]["heldout"]
    assert calls == {"pack_all": 1, "heldout_loss": 2}


def test_a_run_says_how_many_rows_it_skips_and_where_it_is_saved(tmp_path: Path) -> None:
    recipe = load(tiny_recipe(tmp_path, rows=3))
    damaged = replace(tiny_row("image_to_text", 1), media={"image": [b"no image"], "audio": [], "video": []})
    write_parquet(tmp_path / "train.parquet", [*(tiny_row(task, 0) for task in TASKS), damaged])
    with console.capture() as printed:
        checkpoint = Trainer(recipe).fit().checkpoint
    said = "".join(printed.get().split())
    assert f"rowsskipped:1(rejected.jsonl)saved{checkpoint}" in said
    (skipped,) = (json.loads(line) for line in (tmp_path / "run" / "rejected.jsonl").read_text().splitlines())
    assert skipped["id"] == damaged.id and "unreadable image" in skipped["reason"]
    last = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["rejected"] == {"image_to_text": 1}
    reason = "image ...: unreadable image of ... bytes: UnidentifiedImageError: cannot identify image file these bytes"
    assert json.loads(last)["rejected_reasons"] == {"image_to_text": {reason: 1}}


@pytest.mark.second
def test_a_finished_run_answers_prompts_on_the_device_that_it_would_train_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Trainer(load(tiny_recipe(tmp_path))).fit()
    (tmp_path / "eye.png").write_bytes(png(0))
    answerer = Answerer(tmp_path / "run", output_dir=tmp_path, max_new_tokens=5)
    made, shown = answerer.answer("what?", {"image": [str(tmp_path / "eye.png")]})
    assert len(made.tokens) <= 5 and len(shown) == len(made.parts)
    with pytest.raises(UserError, match=r"no image at .*no.png"):
        answerer.answer("what?", {"image": [str(tmp_path / "no.png")]})
    devices: list[torch.device] = []
    monkeypatch.setattr("omnitrain.train.verbs.answer.use_device", lambda settings: torch.device("meta"))
    monkeypatch.setattr(
        "omnitrain.train.verbs.answer.generate", lambda model, *_, **__: devices.append(model.device) or [Answer()]
    )
    Answerer(tmp_path / "run", output_dir=tmp_path).answer("what?", {})
    assert devices == [torch.device("meta")]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.train=[{path: nothing.parquet}]", "no file of data at 'nothing.parquet'"),
        ("model.tokenizer=./nothing", "no text tokenizer at './nothing'"),
        ("model.freeze=[image_encodr]", "did you mean 'image_encoder'"),
        ("data.max_frames=9", "data.max_frames: found 9, but no HF processor prepares media"),
        ("train.device=gpu0", "is not a device; expected auto, cpu, cuda"),
        ("evaluation={scorer: 'nothing:f'}", "expected FILE.py:FUNCTION or MODULE:FUNCTION"),
        ("train.loss_weights={txt: 2}", "did you mean `text`"),
        ("model.freeze=[foundation,image_encoder,audio_encoder,image_decoder,audio_decoder]", "no parameter is tra"),
    ],
)
def test_mistakes_are_one_clear_error_before_anything_is_written(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Trainer(load(tiny_recipe(tmp_path, evaluated=True), override))
    assert not (tmp_path / "run").exists()


def test_data_of_which_nothing_fits_leave_an_earlier_run_in_its_place(tmp_path: Path) -> None:
    path = tiny_recipe(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("the earlier one")
    with pytest.raises(UserError, match=r"all of \d+ rows were rejected; .* a pack holds at most 9"):
        Trainer(load(path, "data.pack_tokens=9")).fit()
    assert [file.name for file in tmp_path.glob("run*/*")] == ["recipe.yaml"]


def test_an_output_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    recipe = load(tiny_recipe(tmp_path, text_only=True), f"output_dir={tmp_path / 'recipe.yaml' / 'run'}")
    with pytest.raises(UserError, match=r"output_dir: .*is not a writable folder"):
        Trainer(recipe)


def test_an_output_folder_that_the_system_refuses_is_a_message(tmp_path: Path) -> None:
    trainer = Trainer(load(tiny_recipe(tmp_path, text_only=True), f"output_dir={tmp_path / 'taken' / 'run'}"))
    (tmp_path / "taken").touch()
    with pytest.raises(UserError, match=r"output_dir: .* cannot be written: .*; use another folder"):
        trainer.fit()


def test_a_folder_that_holds_no_run_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    with pytest.raises(UserError, match="has files but no run"):
        Trainer(load(tiny_recipe(tmp_path, text_only=True), f"output_dir={tmp_path / 'thesis'}"))
    assert (tmp_path / "thesis" / "chapter.txt").is_file()


@pytest.mark.second
def test_space_for_a_checkpoint_is_asked_for_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By as many bytes as the numbers of one then take, whose parts have all been trained."""
    recipe = load(tiny_recipe(tmp_path), "train.steps=3")
    summary = Trainer(recipe).fit()
    (weights,) = summary.checkpoint.glob("*.safetensors")
    names = 8 + int.from_bytes(weights.read_bytes()[:8], "little")  # the header of the file
    state = FileSystemReader(summary.checkpoint / "optimizer").read_metadata().state_dict_metadata
    moments = [kept for name, kept in state.items() if not name.endswith(".step")]
    needed = checkpoint_bytes(Trainer(recipe).model)
    assert needed == weights.stat().st_size - names + sum(4 * kept.size.numel() for kept in moments)
    disk = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk._replace(free=needed - 1))
    with pytest.raises(
        UserError,
        match=r"output_dir: a checkpoint of this run takes [1-9][\d.]* MiB, but the disk of .* has [1-9][\d.]* MiB f",
    ):
        Trainer(recipe).fit()
    assert not (tmp_path / "run.old1").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk._replace(free=needed))
    assert Trainer(recipe).fit().step == 3

"""Averages of weights: as a recurrence by hand has them, over a resume, in exports and evaluation."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from omnitrain.data.sources.rows import open_sources
from omnitrain.errors import UserError
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.recipe import Recipe
from omnitrain.train.build_from_recipe import load_checkpoint
from omnitrain.train.evaluate.evaluate import Evaluator
from omnitrain.train.nonfinite import NonFiniteError
from omnitrain.train.process_groups import join_ranks
from omnitrain.train.trainer import Trainer
from omnitrain.train.verbs.export import export
from tests.parallel.laid_out import full
from tests.stored import stored
from tests.tiny import tiny_recipe
from tests.train.test_ranks import assert_same_run, fit

DECAY = 0.9
EMA = [f"train.ema.decay={DECAY}", "model.freeze=[image_encoder.tower]", "train.optimizer.learning_rate=1e-2"]
TWO_PACKS = ["train.packs_per_step=2"]


def whole(model: OmniModel) -> dict[str, Tensor]:
    return {name: full(p.detach()).double() for name, p in model.named_parameters() if p.requires_grad}


def averaged_by_hand(recipe: Path, overrides: Sequence[str], file: Path, resume: bool = False) -> float:
    """Train; the largest difference of an average from the recurrence in fp64, which ``file`` keeps between runs."""
    trainer = Trainer(Recipe.load(str(recipe), [*EMA, *overrides]), resume=resume)
    by_hand = torch.load(file) if resume else whole(trainer.model)
    step = trainer.train_step

    def train_step(batch: Any) -> tuple[float, float]:
        result = step(batch)
        for name, weight in whole(trainer.model).items():
            by_hand[name] = DECAY * by_hand[name] + (1 - DECAY) * weight
        return result

    trainer.train_step = train_step
    trainer.fit()
    assert trainer.ema is not None
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    averages = {names[parameter]: full(state["average"]) for parameter, state in trainer.ema.state.items()}
    assert averages.keys() == by_hand.keys() and not any("tower" in name for name in averages if "image" in name)
    weights = whole(trainer.model)
    assert max(float((weights[name] - average).abs().max()) for name, average in averages.items()) > 1e-3
    if trainer.ranks.is_first:
        torch.save(by_hand, file)
    return max(float((average - by_hand[name]).abs().max()) for name, average in averages.items())


@pytest.mark.parametrize(
    ("before", "after", "steps"),
    [pytest.param(2, 1, 4, marks=pytest.mark.second), pytest.param(4, 2, 50, marks=pytest.mark.slow)],
    ids=["dp2", "dp4"],
)
def test_averages_are_those_by_hand_also_when_a_run_resumes_on_fewer_ranks(
    ranks: RankPool, tmp_path: Path, before: int, after: int, steps: int
) -> None:
    recipe, by_hand = tiny_recipe(tmp_path), tmp_path / "by_hand.pt"
    first = ranks.run(
        averaged_by_hand, recipe, [*TWO_PACKS, f"train.steps={steps // 2}"], by_hand, timeout_s=120, world=before
    )
    last = ranks.run(
        averaged_by_hand, recipe, [*TWO_PACKS, f"train.steps={steps}"], by_hand, True, timeout_s=120, world=after
    )
    assert max(*first, *last) < 1e-6


@pytest.mark.parametrize(
    "overrides",
    [
        ["parallel.default={precision: {param: bfloat16}, memory: {offload: [optimizer]}}"],
        ["parallel.components.foundation.lora={rank: 2}"],
    ],
    ids=["offload", "lora"],
)
def test_averages_change_no_training_whatever_the_optimizer_keeps(tmp_path: Path, overrides: list[str]) -> None:
    """Nor does their evaluation: fp32 copies of rounded weights stay as they are."""
    recipe = tiny_recipe(tmp_path, text_only=True, evaluated=True)
    overrides = [*overrides, "evaluation.loss_every=1", "train.optimizer.learning_rate=1e-2"]
    losses = {}
    for name, ema in (("plain", []), ("averaged", [f"train.ema.decay={DECAY}", "evaluation.ema=true"])):
        Trainer(Recipe.load(str(recipe), [*overrides, *ema, f"output_dir={tmp_path / name}"])).fit()
        losses[name] = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
    for plain, averaged in zip(*losses.values(), strict=True):
        assert plain["loss"] == averaged["loss"] and plain["heldout"]["loss"] != averaged["heldout"]["loss"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps that evaluated its averages."""
    folder = tmp_path_factory.mktemp("run")
    recipe = tiny_recipe(folder, text_only=True, evaluated=True, steps=3)
    Trainer(Recipe.load(str(recipe), [EMA[0], EMA[2], "evaluation.ema=true"])).fit()
    return folder / "run"


def test_an_export_has_the_averages(run: Path, tmp_path: Path) -> None:
    checkpoint = run / "checkpoints" / "step-00000003"
    exported = {}
    for name in ("weights", "averages"):
        export(run, tmp_path / name, ema=name == "averages")
        exported[name] = AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
    averages = {name.removesuffix(".average"): average for name, average in stored(checkpoint / "ema").items()}
    trained = OmniModel.from_pretrained(checkpoint).state_dict()
    for name, average in averages.items():
        of_weights, of_averages = (one[name.removeprefix("foundation.")] for one in exported.values())
        assert torch.equal(of_averages, average) and torch.equal(of_weights, trained[name])
    assert averages.keys() == {name for name in trained if "lm_head" not in name}  # which is tied


def test_an_evaluation_is_that_of_a_model_with_the_averages(run: Path) -> None:
    recipe = Recipe.load(str(run / "recipe.yaml"))
    heldout, ranks = open_sources(recipe.data.heldout), join_ranks(recipe.parallel, torch.device("cpu"))
    alone = Evaluator(*load_checkpoint(run, averaged=True), heldout, recipe, ranks).losses()
    of_weights = Evaluator(*load_checkpoint(run), heldout, recipe, ranks).losses()
    evaluated = json.loads((run / "eval.json").read_text())["losses"]
    assert evaluated["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    assert evaluated["loss"] != pytest.approx(of_weights["loss"], rel=1e-4)


def test_a_step_that_is_not_finite_moves_no_average(tmp_path: Path) -> None:
    trainer = Trainer(Recipe.load(str(tiny_recipe(tmp_path, text_only=True)), [EMA[0]]))
    before = copy.deepcopy(trainer.ema.state_dict()["state"])
    trainer.model.foundation.model.norm.register_forward_hook(lambda _, __, out: out * float("nan"))
    with pytest.raises(NonFiniteError):
        trainer.fit()
    after = trainer.ema.state_dict()["state"]
    assert before and all(torch.equal(after[place]["average"], state["average"]) for place, state in before.items())


def test_an_export_of_averages_that_no_run_kept_is_refused(tmp_path: Path) -> None:
    Trainer(Recipe.load(str(tiny_recipe(tmp_path, text_only=True)), ["train.steps=1"])).fit()
    with pytest.raises(UserError, match=r"has no averages of its weights; only a run with `train\.ema` keeps them"):
        export(tmp_path / "run", tmp_path / "exported", ema=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (3, 'parallel.sections={"media":{"components":["image_encoder","audio_encoder"],"ranks":1}}'),
        (2, "parallel.components.foundation.pp=2"),
    ],
    ids=["section", "pp2"],
)
def test_averages_on_sections_and_stages_are_evaluated_as_in_one_process(
    ranks: RankPool, tmp_path: Path, world: int, layout: str
) -> None:
    recipe = tiny_recipe(tmp_path, evaluated=True)
    averaged = [*TWO_PACKS, EMA[0], "evaluation.ema=true", "evaluation.loss_every=2"]
    fit(recipe, [*averaged, f"output_dir={tmp_path / 'one'}"])
    ranks.run(fit, recipe, [*averaged, layout, f"output_dir={tmp_path / 'many'}"], timeout_s=120, world=world)
    assert_same_run(tmp_path / "many", tmp_path / "one")
    one, many = (json.loads((tmp_path / run / "eval.json").read_text())["losses"] for run in ("one", "many"))
    assert many["loss"] == pytest.approx(one["loss"], rel=1e-5)
    averages = [stored(max((tmp_path / run / "checkpoints").iterdir()) / "ema") for run in ("one", "many")]
    assert averages[0].keys() == averages[1].keys()
    assert max(float((averages[1][name] - one).abs().max()) for name, one in averages[0].items()) < 1e-4

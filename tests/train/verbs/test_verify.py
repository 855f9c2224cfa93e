from __future__ import annotations

from pathlib import Path

import pytest
import torch

from omnitrain.errors import UserError
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.verify.tiny_model import needed_memory, num_parameters
from omnitrain.parallel.verify.verify import VerifyReport, VerifyRow
from omnitrain.recipe import Recipe
from omnitrain.recipe.parallel import ComponentPlan, ParallelPlan
from omnitrain.recipe.plan_groups import Precision
from omnitrain.train.verbs import verify as verify_verb
from omnitrain.train.verbs.verify import _parsed, model_of, verify, verify_recipe
from tests.tiny import tiny_recipe


def test_a_recipe_is_verified_on_its_own_model_and_data(tmp_path: Path, ranks: RankPool) -> None:
    report = verify_recipe(Recipe.load(str(tiny_recipe(tmp_path))), ["dp2.accum2"], nproc=2, num_samples=7, pool=ranks)
    (row,) = report.rows
    assert row.status == "equal" and report.ok, row.reason
    assert row.loss_error < 1e-6 and row.collectives > 0


def test_a_recipe_stands_for_its_model(tmp_path: Path, ranks: RankPool) -> None:
    recipe, ids = Recipe.load(str(tiny_recipe(tmp_path, text_only=True))), torch.arange(7)
    (row,) = verify(recipe, [{"input_ids": ids, "labels": ids}], ["dp2"], pool=ranks).rows
    assert row.status == "equal", row.reason


def test_a_recipe_too_large_for_the_machine_is_shrunk_in_depth_and_rows(tmp_path: Path, ranks: RankPool) -> None:
    config = "model.foundation.config"
    path = tiny_recipe(tmp_path, text_only=True)
    recipe = Recipe.load(str(path), [f"{config}.num_hidden_layers=7", f"{config}.vocab_size=5000"])
    parameters = num_parameters(model_of(recipe, "meta"))
    memory = needed_memory(parameters, 2) - 1
    report = verify_recipe(recipe, ["dp2"], nproc=2, num_samples=7, pool=ranks, memory=memory)
    assert [row.status for row in report.rows] == ["equal"], str(report)
    assert report.parameters < parameters
    assert "2 of 7 layers, 512 of 5,000 vocabulary rows" in " ".join(str(report).split())


@pytest.mark.second
def test_the_recipes_own_plan_is_verified(ranks: RankPool, tmp_path: Path) -> None:
    """In fp32: rounding to bf16 would be a difference of its own."""
    own = "parallel={default: {tp: 2, precision: {compute: bfloat16}}, components: {image_encoder: {mode: replicate}}}"
    recipe = Recipe.load(str(tiny_recipe(tmp_path)), [own])
    (row,) = verify_recipe(recipe, ["plan"], nproc=2, num_samples=3, pool=ranks).rows
    assert row.status == "equal" and "tp=2" in row.layout and "mode=replicate" in row.layout, row.reason
    usual = verify_recipe(recipe, nproc=1, num_samples=3, pool=ranks).rows
    assert [r.layout for r in usual] == [row.layout, "dp2", "dp4", "hsdp2x2"]
    assert [r.status for r in usual] == ["refused"] * 4


def test_a_recipe_whose_layout_a_run_will_choose_is_verified_under_the_usual_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def verified(_: object, __: object, layouts: list[object], **___: object) -> None:
        asked.extend(layouts)
        raise UserError("enough")

    monkeypatch.setattr(verify_verb, "verify_model", verified)
    recipe = Recipe.load(str(tiny_recipe(tmp_path, text_only=True)), ["parallel=auto"])
    for layouts in ((), ("plan",)):
        with pytest.raises(UserError, match="enough"):
            verify_recipe(recipe, layouts)
    assert [*map(str, asked[:-1])] == ["dp2", "dp4", "hsdp2x2"] and asked[-1] == ParallelPlan()


@pytest.mark.parametrize(
    ("word", "dtypes"),
    [
        ("plan", Precision()),
        ("plan.bf16", Precision(compute="bfloat16")),
        ("plan.bf16_param", Precision(param="bfloat16")),
    ],
)
def test_the_recipes_own_plan_has_the_dtypes_of_its_word(tmp_path: Path, word: str, dtypes: Precision) -> None:
    own = "parallel={default: {tp: 2}, components: {image_encoder: {precision: {compute: bfloat16}}}}"
    plan = _parsed(Recipe.load(str(tiny_recipe(tmp_path)), [own]), word)
    assert isinstance(plan, ParallelPlan) and plan.default == ComponentPlan(tp=2, precision=dtypes)
    assert plan.components["image_encoder"].precision == Precision()


def test_a_report_is_ok_if_something_is_equal_and_only_what_nobody_named_is_refused() -> None:
    equal, refused, unnamed = (
        VerifyRow("dp2", "equal", loss_error=0.0),
        VerifyRow("dp8", "refused", "needs 8 ranks"),
        VerifyRow("dp4", "refused", "needs 4 ranks", is_optional=True),
    )
    different = VerifyRow("dp2", "different", "the loss is off by nan", is_optional=True)
    reports = [VerifyReport(rows, 1) for rows in ((equal, unnamed), (equal, refused), (unnamed,), (equal, different))]
    assert [report.ok for report in reports] == [True, False, False, False]
    assert [len(report.refused) for report in reports] == [0, 1, 1, 0]


def test_a_misspelt_layout_is_told_the_words_there_are(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"(?s)`plam`: not understood.*or `plan`, which is the recipe's own"):
        verify_recipe(Recipe.load(str(tiny_recipe(tmp_path))), ["plam"])

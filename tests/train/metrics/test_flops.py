from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from omnitrain.data.packing.pack import Pack
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.flops import ModelFlops, PackFlops
from omnitrain.ops.flops import Flops, Passes
from omnitrain.parallel.memory.recompute import SAVED_OPS
from omnitrain.recipe import ComponentPlan, Recipe
from omnitrain.train.metrics.flops import Peak, StepFlops, flop_metrics, follow_plan
from omnitrain.train.trainer import Trainer
from tests.tiny import EXPERTS, FOUNDATION, tiny_model, tiny_processor, tiny_recipe, tiny_samples


def test_mfu_is_the_models_flops_by_what_the_ranks_could_compute() -> None:
    found = PackFlops({"foundation": Passes(Flops(100, 20, 40), Flops(200, 40, 80), Flops(100, 20, 40))})
    peaks = [Peak(300.0, "a sheet"), Peak(100.0, "measured")]
    line = flop_metrics(found, steps=2, tokens=10, seconds=3.0, peaks=peaks, left_out={})
    assert line["mfu"] == 360 / (3 * 400) and line["mfu_full"] == 420 / (3 * 400) and line["hfu"] == 480 / (3 * 400)
    flops = line["flops"]
    assert (flops["per_step"], flops["per_step_full"], flops["per_step_hardware"]) == (180, 210, 240)
    assert flops["per_token"] == 36 and flops["components"] == {"foundation": 180}
    assert (flops["peak"], flops["peak_source"]) == (300.0, "a sheet") and "left_out" not in flops


def test_what_cannot_be_counted_is_named_and_without_the_foundation_there_is_no_mfu() -> None:
    peaks = [Peak(1.0, "")]
    line = flop_metrics(PackFlops(), 1, 1, 1.0, peaks, {"image_encoder": "why"})
    assert line["flops"]["left_out"] == {"image_encoder": "why"} and "mfu" in line
    assert flop_metrics(PackFlops(), 1, 1, 1.0, peaks, {"foundation": "why"}) == {
        "flops": {"left_out": {"foundation": "why"}}
    }


@pytest.mark.second
def test_an_encoder_that_reads_the_content_of_its_weights_is_left_out_and_the_rest_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model()
    pack = Pack.from_samples(tiny_samples(tiny_processor(model), 2))
    steps = StepFlops(ModelFlops(model), None)

    def reads(self: Any, features: Any, num_tokens: Any) -> Any:
        return features["pixel_values"][: int(self.time_projector.weight.sum())]

    monkeypatch.setattr(type(model.image_encoder), "lm_encode", reads)
    topology = SimpleNamespace(readers=(0,), is_owner=lambda rank: True)
    batch: Any = SimpleNamespace(packs=(pack,), media_calls=({},), plan=SimpleNamespace(topology=topology))
    found = steps.of(batch)
    assert "DataDependent" in steps.left_out["image_encoder"]
    assert found.components["foundation"].model.total > 0 and "image_encoder" not in found.components


@pytest.mark.second
def test_a_plans_freeze_and_recompute_are_counted() -> None:
    model = build_omni_model(foundation=FOUNDATION | EXPERTS, init_device="meta").train()
    flops = ModelFlops(model)

    def passes(**settings: Any) -> Passes:
        follow_plan(flops, {"foundation": ComponentPlan(**settings)})
        return flops.of_samples([8], predicted=3)

    tokens, layers, pairs = 8, 2, 36
    attention = 2 * 32 * (32 + 2 * 16) + 2 * 32 * 32
    router, experts = 2 * 32 * 8, 2 * 3 * 2 * 32 * 16
    whole = Flops(layers * tokens * (attention + router + experts), layers * 128 * pairs, layers * 128 * 64)
    assert passes(memory={"recompute": "none"}).again == Flops()
    assert passes(memory={"recompute": "full"}).again == whole
    assert passes(memory={"recompute": {"keep": list(SAVED_OPS)}}).again == Flops()
    saved = [op for op in SAVED_OPS if op != "aten._grouped_mm"]
    assert passes(memory={"recompute": {"keep": saved}}).again == Flops(layers * tokens * experts)
    parts = passes(memory={"recompute": {"parts": ["attention", "router"]}}).again
    assert parts == Flops(layers * tokens * (attention + router), whole.kept, whole.full)
    assert passes(memory={"recompute": "none"}, freeze=True).backward == Flops()


def test_a_run_counts_flops_where_the_recipe_asks_for_it(tmp_path: Path) -> None:
    recipe = str(tiny_recipe(tmp_path, text_only=True, steps=2))
    Trainer(Recipe.load(recipe, ["train.flops=true"])).fit()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        flops = line["flops"]
        assert line["mfu"] > 0 and flops["peak_source"].startswith("measured")
        assert line["mfu"] / line["mfu_full"] == pytest.approx(flops["per_step"] / flops["per_step_full"])
        assert line["memory_mb"] == line["memory_mb_mean"]
    assert Trainer(Recipe.load(recipe, [f"output_dir={tmp_path / 'auto'}"])).measures.flops.peak is None

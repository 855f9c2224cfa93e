"""Learning rates of their own for parts of a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from omnitrain.errors import UserError
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.recipe import Recipe
from omnitrain.train.trainer import Trainer
from omnitrain.train.verbs.check import check_recipe
from tests.tiny import tiny_recipe

KEY = "train.optimizer.learning_rates"
RATES = f"{KEY}={{image_encoder: 1.0e-5, image_encoder.projector: 1.0e-4}}"
PLAIN = ["train.steps=1", "train.optimizer.warmup_steps=0", "train.optimizer.weight_decay=0"]


def loaded(folder: Path, *overrides: str) -> Recipe:
    return Recipe.load(str(tiny_recipe(folder)), [*PLAIN, *overrides])


def test_each_part_moves_by_its_own_rate_and_the_longest_name_counts(tmp_path: Path) -> None:
    """A first step of AdamW moves every weight with a gradient by the rate."""
    trainer = Trainer(loaded(tmp_path, RATES, "train.optimizer.eps=1e-20", "train.optimizer.learning_rate=1e-3"))
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.fit()
    moved: dict[str, float] = {}
    for name, parameter in trainer.model.named_parameters():
        part = next((p for p in ("image_encoder.projector", "image_encoder") if name.startswith(p)), "others")
        moved[part] = max(moved.get(part, 0.0), (parameter - before[name]).abs().max().item())
    expected = {"image_encoder.projector": 1e-4, "image_encoder": 1e-5, "others": 1e-3}
    assert moved == pytest.approx(expected, rel=0.02)
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert (line["learning_rate"], line["learning_rates"]) == (
        1e-3,
        {"image_encoder": 1e-5, "image_encoder.projector": 1e-4},
    )


def sizes(recipe: Recipe) -> dict[float, int]:
    """Peak -> numbers of this rank's optimizer that have it, whole."""
    found: dict[float, int] = {}
    trainer = Trainer(recipe)
    for group in trainer.optimizer.param_groups:
        found[group["peak"]] = found.get(group["peak"], 0) + sum(parameter.numel() for parameter in group["params"])
    trainer.ranks.peers.any(False)  # the first one has the store where the others meet
    return found


def test_ranks_give_the_same_rates_to_the_same_parameters(ranks: RankPool, tmp_path: Path) -> None:
    recipe = loaded(tmp_path, RATES, "train.packs_per_step=2")
    alone = sizes(recipe)
    assert len(alone) == 3 and ranks.run(sizes, recipe, timeout_s=60, world=2) == [alone] * 2


@pytest.mark.second
@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ([f"{KEY}={{image_encodr: 1.0e-5}}"], r"learning_rates: 'image_encodr' matches no parameter; did you mean"),
        ([f"{KEY}={{foundation: 1.0e-5}}", "model.freeze=[foundation]"], "'foundation' has no trained parameter"),
        (
            [RATES, "parallel.components={image_encoder: {freeze: true}}"],
            "'image_encoder' has no trained parameter",
        ),
        (
            ["train.optimizer.weight_decays={foundation.model.norm: 0.1}"],
            "'foundation.model.norm' has only norms and biases, to which weight decay does not apply",
        ),
    ],
)
def test_a_name_of_nothing_that_trains_is_refused(tmp_path: Path, overrides: list[str], problem: str) -> None:
    recipe = loaded(tmp_path, *overrides)
    with pytest.raises(UserError, match=problem):
        Trainer(recipe)
    assert any(problem.split(": ")[-1].split(";")[0] in found for found in check_recipe(recipe))


def test_groups_without_rates_of_their_own_are_matrices_and_vectors(tmp_path: Path) -> None:
    groups = Trainer(loaded(tmp_path)).optimizer.param_groups
    assert [(group["peak"], group["weight_decay"]) for group in groups] == [(3e-4, 0.0)] * 2
    assert [{parameter.ndim >= 2 for parameter in group["params"]} for group in groups] == [{True}, {False}]
    assert all(isinstance(parameter, torch.nn.Parameter) for group in groups for parameter in group["params"])

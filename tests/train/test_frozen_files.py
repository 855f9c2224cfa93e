"""Weights that do not train are stored once for all checkpoints of a process."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from omnitrain.checkpoint import store
from omnitrain.checkpoint.store import verify
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.recipe import Recipe
from omnitrain.train.run_state import save
from omnitrain.train.trainer import Trainer
from tests.tiny import tiny_recipe

A_BLOCK_EACH = 1
FROZEN = "parallel.components.foundation.freeze=true"


def fit(recipe: Path, overrides: Sequence[str], resume: bool = False) -> Path:
    """Train, with a file for each block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save, "files_of", partial(save.files_of, file_bytes=A_BLOCK_EACH))
        return Trainer(Recipe.load(str(recipe), list(overrides)), resume=resume).fit().checkpoint


def contents(checkpoint: Path) -> dict[str, str]:
    files = [path for path in checkpoint.rglob("*") if path.suffix in (".safetensors", ".json")]
    return {str(path.relative_to(checkpoint)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def shared(first: Path, second: Path) -> set[str]:
    return {path.name for path in first.glob("*") if path.samefile(second / path.name)}


@pytest.mark.second
def test_files_without_a_weight_that_trains_are_linked_and_all_files_are_as_without_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_recipe(tmp_path, steps=4, save={"every": 2})
    checksum, read = store._checksum, []
    monkeypatch.setattr(store, "_checksum", lambda file: read.append(file.name) or checksum(file))
    newest = fit(recipe, [FROZEN])
    first = newest.with_name("step-00000002")
    linked = shared(first, newest)
    assert len(linked) >= 2 and all(name.endswith(".safetensors") for name in linked)
    assert all(read.count(name) == 1 for name in linked) and read.count("trainer.pt") == 2
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(95, "Operation not supported")))
    plain = fit(recipe, [FROZEN, f"output_dir={tmp_path / 'plain'}"])
    assert not shared(plain.with_name(first.name), plain)
    without = {"manifest.json", "metrics.json", "run/environment.json"}  # they have times, and free space
    assert {k: v for k, v in contents(plain).items() if k not in without} == {
        k: v for k, v in contents(newest).items() if k not in without
    }


def test_a_checkpoint_stays_whole_without_those_that_it_shares_files_with(tmp_path: Path) -> None:
    """A resumed run writes its first checkpoint anew: its plan may have rounded the weights."""
    recipe = tiny_recipe(tmp_path, steps=3, save={"every": 1, "keep_last": 1})
    last = fit(recipe, [FROZEN])
    assert [path.name for path in last.parent.iterdir()] == ["step-00000003"]
    verify(last)
    again = fit(recipe, [FROZEN, "train.steps=4", "train.save.keep_last=2"], resume=True)
    assert not shared(last, again)
    for checkpoint in (last, again):
        verify(checkpoint)
        OmniModel.from_pretrained(checkpoint)


@pytest.mark.second
def test_ranks_link_what_one_process_links(ranks: RankPool, tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, steps=2, save={"every": 1}, packs_per_step=2)
    alone = fit(recipe, [FROZEN, f"output_dir={tmp_path / 'alone'}"])
    of_ranks, _ = ranks.run(fit, recipe, [FROZEN], timeout_s=120, world=2)
    verify(of_ranks)
    first = of_ranks.with_name("step-00000001")
    assert shared(first, of_ranks) == shared(alone.with_name(first.name), alone) != set()
    names = shared(first, of_ranks) | {"model.safetensors.index.json"}
    assert {name: contents(of_ranks)[name] for name in names} == {name: contents(alone)[name] for name in names}

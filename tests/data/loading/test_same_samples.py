"""Of the ranks that hold the same samples one decodes an item, and the others receive it."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest

from omnitrain.data.loading.slots import SameSamples
from omnitrain.data.render import component_media
from omnitrain.data.sources.clips import Choose
from omnitrain.data.sources.media import MediaFile, decode_medium
from omnitrain.parallel.spawn.pool import RankError, RankPool
from omnitrain.parallel.step.media_dispatch import StepBatch
from omnitrain.recipe import Recipe
from omnitrain.train.trainer import Trainer
from tests.tiny import tiny_recipe, tiny_row, write_parquet

Indices = list[tuple[int, ...]]  # of the samples of each pack


def train(recipe: Path, overrides: Sequence[str]) -> Indices:
    """Log what the processes of this rank decode for its steps. Return its samples."""
    trainer, indices = Trainer(Recipe.load(str(recipe), list(overrides))), Indices()
    inner = trainer.train_step

    def decode(modality: str, file: MediaFile, choose: Choose) -> object:
        with open(recipe.parent / "decoded", "a") as log:
            log.write(f"{modality} {zlib.crc32(file.begun().read())}\n")
        return decode_medium(modality, file, choose)

    def train_step(batch: StepBatch) -> tuple[float, float]:
        indices.extend(pack.info.indices for pack in batch.packs)
        return inner(batch)

    trainer.train_step = train_step
    with patch.object(component_media, "decode_medium", decode):
        trainer.fit()
    return indices


@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        (2, ["parallel.default.ulysses=2"]),
        pytest.param(2, ["parallel.components.foundation.tp=2"], marks=pytest.mark.slow),
        pytest.param(2, ["parallel.components.foundation.pp=2"], marks=pytest.mark.second),
        pytest.param(4, ["parallel.default.ulysses=2", "train.packs_per_step=2"], marks=pytest.mark.slow),
        pytest.param(4, ["parallel.default.ulysses=2"], marks=pytest.mark.slow),
    ],
    ids=["sp2", "tp2", "pp2", "dp2.sp2", "dp2.sp2 with one pack"],
)
def test_each_item_is_decoded_once_per_group_of_ranks_that_share_it(
    ranks: RankPool, tmp_path: Path, world: int, overrides: list[str]
) -> None:
    recipe = tiny_recipe(tmp_path, rows=280, steps=3)
    indices = ranks.run(train, recipe, overrides, timeout_s=120, world=world)
    decoded = Counter((tmp_path / "decoded").read_text().splitlines())
    assert len(decoded) > 10 and set(decoded.values()) == {1}
    assert all(indices[rank] == indices[rank ^ 1] for rank in range(world))
    trained = [index for rank in range(0, world, 2) for pack in indices[rank] for index in pack if index >= 0]
    assert len(trained) == len(set(trained)) > 10


@pytest.mark.parametrize(("plan", "workers"), [("default.ulysses", 0), ("components.foundation.tp", 1)])
def test_a_mistake_in_the_data_ends_the_ranks_that_wait_for_them(
    ranks: RankPool, tmp_path: Path, plan: str, workers: int
) -> None:
    """One rank finds it, in a later step; the other has the end of its connection."""
    recipe, rows = tiny_recipe(tmp_path, text_only=True, steps=40), [tiny_row("text", seed) for seed in range(40)]
    rows[20].messages[0]["content"][0]["text"] = "long " * 500
    data = write_parquet(tmp_path / "rows.parquet", rows)
    overrides = [f"parallel.{plan}=2", f"data.workers={workers}", f"data.train=[{{path: {data}}}]"]
    with pytest.raises(RankError, match=r"failed on 2 of 2 ranks") as failure:
        ranks.run(train, recipe, [*overrides, "data.overlong=error"], timeout_s=60, world=2)
    assert "DataError: row 'text/20': 2506 tokens, but a pack holds at most 160" in str(failure.value)
    assert "TrainingError: the data failed on another rank" in str(failure.value)
    assert [*(tmp_path / "run" / "checkpoints").iterdir()]  # the steps before it


def test_ranks_that_divide_a_pack_hold_the_same_samples_too() -> None:
    def firsts(data_ranks: list[int | None], size: int, slots: int) -> list[int] | None:
        same = SameSamples.of(data_ranks, size, slots, 0, list)
        return same and list(same.firsts)

    assert firsts([0], 1, 4) is firsts([0, 1], 2, 2) is firsts([0, 1, None, None], 2, 2) is None
    assert firsts([0, 0, 1, 1], 2, 2) == [0, 0, 2, 2]
    assert firsts([0, 1], 2, 1) == [0, 0]
    assert firsts([0, 0, 1, 1, None], 2, 1) == [0, 0, 0, 0, 4]
    assert firsts([0, 1, 2, 3], 4, 2) == [0, 1, 0, 1]

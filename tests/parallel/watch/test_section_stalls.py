"""A rank that holds up a section, or that a section holds up, is named with the section, the message and the rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import omnitrain as ot
from omnitrain.data.packing.pack import Pack
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.state import init_state_of
from omnitrain.recipe.parallel import Section
from tests.parallel.factories import any_to_any
from tests.parallel.laid_out import PLAIN, samples
from tests.parallel.watch.stalls import kill, reported, sleep


def rank_and_section(freeze: bool, **settings: Any) -> tuple[ot.OmniModel, list[Pack]]:
    """Rank 0 is `main`, rank 1 encodes the image of each of four micro-batches."""
    section = Section(components=["image_encoder"], ranks=1, **settings)
    encoder = ot.ComponentPlan(freeze=True) if freeze else ot.ComponentPlan()
    plan = ot.ParallelPlan(components={"image_encoder": encoder}, sections={"vision": section})
    state = init_state_of(plan)
    model = ot.build_parallelize_model(any_to_any().train(), parallel_state=state, parallel_plan=plan, **PLAIN)
    packs = [Pack.from_samples(samples("image_to_text"))] * 4 if dist.get_rank() == 0 else []
    return model, packs


trained = partial(rank_and_section, freeze=False)
frozen = partial(rank_and_section, freeze=True, slots=1)


def test_main_waits_for_a_message_of_the_section_rank_that_sleeps(ranks: RankPool, tmp_path: Path) -> None:
    at = ("section vision: encoding of image_encoder from micro-batch 2", None)
    text = reported(ranks, tmp_path, trained, at, sleep)
    assert "  rank 1 is in section vision: encoding of image_encoder from micro-batch 2, step 2, for " in text
    waits = "receive of the features of image_encoder from micro-batch 2 from section vision, step 2, for rank 1"
    assert f"  waiting: rank 0 in {waits}\n" in text
    assert "  stack of rank 1:\n" in text and "time.sleep(600)" in text


def test_a_section_waits_for_gradients_of_the_rank_that_sleeps(ranks: RankPool, tmp_path: Path) -> None:
    text = reported(ranks, tmp_path, trained, ("backward of stage 0", 1), sleep)
    assert "  rank 0 is in backward of stage 0, step 2, micro-batch 1, samples " in text
    waits = "section vision: receive of the gradients of image_encoder from micro-batch 1, step 2, for rank 0"
    assert f"  waiting: rank 1 in {waits}\n" in text


@pytest.mark.slow
def test_a_section_waits_until_the_rank_that_sleeps_has_room(ranks: RankPool, tmp_path: Path) -> None:
    text = reported(ranks, tmp_path, frozen, ("forward of stage 0", 0), sleep)  # it has window 0, and room for window 1
    waits = "section vision: send of the features of image_encoder from micro-batch 3, step 2, for rank 0"
    assert f"  waiting: rank 1 in {waits}\n" in text


@pytest.mark.slow
def test_main_waits_for_a_section_that_sleeps_while_it_encodes_ahead(ranks: RankPool, tmp_path: Path) -> None:
    at = ("section vision: encoding of image_encoder from micro-batch 1 of the next step", None)
    text = reported(ranks, tmp_path, partial(frozen, ahead=1), at, sleep)
    assert f"  rank 1 is in {at[0]}, step 2, for " in text
    waits = "receive of the features of image_encoder from micro-batch 2 from section vision, step 2, for rank 1"
    assert f"  waiting: rank 0 in {waits}\n" in text


def test_a_killed_section_rank_is_named_with_the_message_by_the_rank_that_needs_it(
    ranks: RankPool, tmp_path: Path
) -> None:
    at = ("section vision: encoding of image_encoder from micro-batch 1", None)
    text = reported(ranks, tmp_path, trained, at, kill)
    assert text.startswith("section vision: rank 1 is gone (killed, or its connection broke: ")
    assert "rank 0 cannot take message " in text and " of vision -> main; it was last seen in section vision: " in text
    assert "; rank 0 needed it in receive of the features of image_encoder from micro-batch " in text

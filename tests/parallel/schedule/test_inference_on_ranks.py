"""Evaluation and generation on ranks, also of sections: the losses and tokens of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import omnitrain as ot
from omnitrain.data.packing.budget import pack_all
from omnitrain.errors import UserError
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.spawn.pool import RankError, RankPool
from omnitrain.parallel.state import init_state_of
from omnitrain.recipe.parallel import MAIN
from tests.parallel.laid_out import PLAIN
from tests.parallel.schedule.test_inference import flat
from tests.parallel.schedule.test_inference_on_stages import Made, any_to_any, deepstack
from tests.tiny import tiny_model, tiny_processor, tiny_samples

TOKENS = 12
SAMPLED = {name: ot.recipe.Sampling(temperature=1.0) for name in ("text", "image_decoder", "audio_decoder")}


class Found(NamedTuple):
    """Of a rank.

    Attributes:
        losses: with packs on all ranks of ``main``, and with all of them on the first; none on ranks of sections.
        answers: number of a prompt -> its tokens, greedy and sampled.
    """

    losses: list[dict[str, float]]
    answers: dict[int, list[list[tuple[str, int]]]]


def share_on(model: OmniModel, layout: str) -> tuple[int, int] | None:
    """Spread the model over the ranks, if there are any.

    Returns:
        Which packs are those of this rank: one of so many; None on ranks of sections.
    """
    if not dist.is_initialized():
        return 0, 1
    plan = ot.recipe.parse_layout(layout).plan()
    state = init_state_of(plan)
    ot.build_parallelize_model(model, parallel_state=state, parallel_plan=plan, **PLAIN)
    return (state.dp_rank, state.dp_size) if state.section == MAIN else None


def evaluated(make: Callable[[], Made], layout: str, times: int = 1) -> list[Found]:
    model, processor, prompts, packs = make()
    share, all_found = share_on(model, layout), []
    for _ in range(times):
        own = range(0) if share is None else range(share[0], len(prompts), share[1])
        shares = [[], []] if share is None else [packs[share[0] :: share[1]], packs if share[0] == 0 else []]
        losses = [flat(ot.heldout_loss(model.eval(), some)) for some in shares]
        some, settings = [prompts[number] for number in own], {"max_new_tokens": TOKENS, "numbers": own}
        answers = [ot.generate(model.train(), processor, some, sampling=how, **settings) for how in ({}, SAMPLED)]
        assert model.training
        of_prompt = zip(*answers, strict=True)
        all_found.append(
            Found(losses, {n: [one.tokens for one in made] for n, made in zip(own, of_prompt, strict=True)})
        )
    return all_found


@pytest.mark.parametrize(
    ("make", "layout", "num_main"),
    [
        pytest.param(any_to_any, "vision1+dp2", 2, marks=pytest.mark.slow),
        pytest.param(any_to_any, "encoders1+pp2", 2, marks=pytest.mark.slow),
        pytest.param(any_to_any, "vision1+tp2", 2, marks=pytest.mark.slow),
        pytest.param(any_to_any, "audio1+vision2+dp1", 1, marks=pytest.mark.slow),
        pytest.param(any_to_any, "encoders2+dp2", 2, marks=pytest.mark.slow),
        pytest.param(any_to_any, "towers1+vision_projector1+dp2", 2, marks=pytest.mark.second),
        pytest.param(any_to_any, "vision_tower1+audio1+pp2", 2, marks=pytest.mark.slow),
        pytest.param(deepstack, "vision1+dp2", 2, marks=pytest.mark.slow),
        pytest.param(deepstack, "vision1+pp2", 2, marks=pytest.mark.second),
        (any_to_any, "sp2", 2),
        pytest.param(any_to_any, "dp2.sp2", 4, marks=pytest.mark.slow),
        pytest.param(any_to_any, "vision1+cp2", 2, marks=pytest.mark.second),
        pytest.param(deepstack, "cp2", 2, marks=pytest.mark.slow),
        pytest.param(any_to_any, "tp2.sp2", 4, marks=pytest.mark.slow),
        pytest.param(any_to_any, "pp2.sp2", 4, marks=pytest.mark.slow),
        pytest.param(any_to_any, "dp2.world", 2, marks=pytest.mark.slow),
        pytest.param(deepstack, "hsdp2x2.window2.world", 4, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_every_layout_says_and_writes_what_one_process_does(
    ranks: RankPool, make: Callable[[], Made], layout: str, num_main: int
) -> None:
    """Also if one rank has all packs, and in a second evaluation."""
    (alone,) = evaluated(make, layout)
    world = ot.recipe.parse_layout(layout).num_ranks
    made = ranks.run(evaluated, make, layout, 2, timeout_s=120, world=world)
    assert made[num_main:] == [[Found([{}, {}], {})] * 2] * (world - num_main)
    for found in (one for of_rank in made[:num_main] for one in of_rank):
        assert found.losses == [pytest.approx(losses, rel=1e-6) for losses in alone.losses]
        assert found.answers == {number: alone.answers[number] for number in found.answers}
    assert {number for of_rank in made[:num_main] for number in of_rank[0].answers} == set(alone.answers)


def loss_of_texts(layout: str) -> tuple[dict[str, float], int]:
    """Held-out loss of texts, and the number of calls of the image encoder on this rank."""
    model = tiny_model(seed=3)
    packs = list(pack_all(tiny_samples(tiny_processor(model), 4, ["text"]), 64))
    share, calls = share_on(model.eval(), layout), list[Any]()
    encoder = model.image_encoder
    encoder.lm_encode = lambda *given: calls.append(given) or type(encoder).lm_encode(encoder, *given)
    losses = ot.heldout_loss(model, [] if share is None else packs[share[0] :: share[1]])
    return flat(losses), len(calls)


def test_texts_run_no_encoder_of_a_section(ranks: RankPool) -> None:
    alone, _ = loss_of_texts("")
    *main, section = ranks.run(loss_of_texts, "vision1+dp2", timeout_s=60, world=3)
    assert main == [(pytest.approx(alone, rel=1e-6), 0)] * 2
    assert section == ({}, 0)


def forward_by_itself() -> str:
    """The error of a plain forward; then all ranks evaluate together as if nothing had been."""
    model = tiny_model(seed=3)
    packs = list(pack_all(tiny_samples(tiny_processor(model), 7), 160))
    share = share_on(model.eval(), "vision1+dp2")
    with pytest.raises(UserError) as error:
        model(packs[1])
    losses = ot.heldout_loss(model, [] if share is None else packs[share[0] :: share[1]])
    assert bool(losses) == (share is not None)
    return str(error.value)


def test_a_forward_by_itself_says_what_to_call(ranks: RankPool) -> None:
    *of_main, of_section = ranks.run(forward_by_itself, timeout_s=60, world=3)
    assert all("image_encoder, which is on other ranks" in found and "heldout_loss" in found for found in of_main)
    assert "rank 2 does not have foundation, which is on other ranks" in of_section


def failing_encoder() -> None:
    model = tiny_model(seed=3)
    packs = list(pack_all(tiny_samples(tiny_processor(model), 7), 160))
    share = share_on(model.eval(), "vision1+dp2")

    def fail(*arguments: Any) -> torch.Tensor:
        raise UserError("image 3 is broken")

    model.image_encoder.lm_encode = fail
    ot.heldout_loss(model, [] if share is None else packs[share[0] :: share[1]])


def test_an_error_of_a_section_ends_the_ranks_that_wait_for_it(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="image 3 is broken"):
        ranks.run(failing_encoder, timeout_s=60, world=3)

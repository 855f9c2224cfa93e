"""Evaluation and generation with encoders on ranks of their own: the losses and tokens of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import omnitrain as ot
from omnitrain.data.packing.budget import pack_all
from omnitrain.errors import TrainingError, UserError
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.sections.serve import AskSections
from omnitrain.parallel.spawn.errors import RankError
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.state import init_state_of
from omnitrain.peers import SINGLE_PROCESS, Peers
from tests.parallel.laid_out import PLAIN
from tests.parallel.pipeline.test_relay import Made, any_to_any, deepstack
from tests.parallel.step.test_lockstep import flat
from tests.tiny import tiny_model, tiny_processor, tiny_samples

TOKENS = 12
SAMPLED = {name: ot.Sampling(temperature=1.0) for name in ("text", "image_decoder", "audio_decoder")}


class Found(NamedTuple):
    """Of a rank of ``main``.

    Attributes:
        losses: with packs on all ranks, and with all of them on the first rank.
        answers: number of a prompt -> its tokens, greedy and sampled.
    """

    losses: list[dict[str, float]]
    answers: dict[int, list[list[tuple[str, int]]]]


def on_ranks(model: OmniModel, layout: str) -> Peers:
    """Spread the model over the ranks, if there are any; return the ranks with other packs."""
    if not dist.is_initialized():
        return SINGLE_PROCESS
    plan = ot.parse_layout(layout).plan()
    state = init_state_of(plan)
    ot.build_parallelize_model(model, parallel_state=state, parallel_plan=plan, **PLAIN)
    return ot.loss_peers(state)


def evaluated(make: Callable[[], Made], layout: str, times: int = 1) -> list[Found | None]:
    model, processor, prompts, packs = make()
    peers = on_ranks(model.eval(), layout)
    own = range(peers.rank, len(prompts), peers.size)

    def work() -> Found:
        shares = [packs[peers.rank :: peers.size], packs if peers.rank == 0 else []]
        with ot.gathered(model):
            losses = [flat(ot.heldout_loss(model, share, peers)) for share in shares]
            some, settings = [prompts[number] for number in own], {"max_new_tokens": TOKENS, "peers": peers}
            answers = [
                ot.generate(model, processor, some, sampling=sampling, numbers=own, **settings)
                for sampling in ({}, SAMPLED)
            ]
        of_prompt = zip(*answers, strict=True)
        return Found(losses, {n: [one.tokens for one in made] for n, made in zip(own, of_prompt, strict=True)})

    found = [ot.serving(model, work) for _ in range(times)]
    assert not model.training
    return found


@pytest.mark.parametrize(
    ("make", "layout", "num_main"),
    [
        pytest.param(any_to_any, "vision1+dp2", 2, marks=pytest.mark.slow),
        pytest.param(any_to_any, "encoders1+pp2", 2, marks=pytest.mark.slow),
        pytest.param(any_to_any, "vision1+tp2", 2, marks=pytest.mark.slow),
        pytest.param(any_to_any, "audio1+vision2+dp1", 1, marks=pytest.mark.slow),
        pytest.param(any_to_any, "encoders2+dp2", 2, marks=pytest.mark.slow),
        (any_to_any, "towers1+vision_projector1+dp2", 2),
        pytest.param(any_to_any, "vision_tower1+audio1+pp2", 2, marks=pytest.mark.slow),
        pytest.param(deepstack, "vision1+dp2", 2, marks=pytest.mark.slow),
        (deepstack, "vision1+pp2", 2),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_model_with_sections_says_and_writes_what_one_process_does(
    ranks: RankPool, make: Callable[[], Made], layout: str, num_main: int
) -> None:
    """Also if one rank has all packs, and in a second evaluation."""
    (alone,) = evaluated(make, layout)
    assert alone is not None
    world = ot.parse_layout(layout).num_ranks
    made = ranks.run(evaluated, make, layout, 2, timeout_s=120, world=world)
    assert made[num_main:] == [[None, None]] * (world - num_main)
    for found in (one for of_rank in made[:num_main] for one in of_rank):
        assert found.losses == [pytest.approx(losses, rel=1e-6) for losses in alone.losses]
        assert found.answers == {number: alone.answers[number] for number in found.answers}
    assert {number for of_rank in made[:num_main] for number in of_rank[0].answers} == set(alone.answers)


def loss_of_texts(layout: str) -> tuple[float, list[str]] | None:
    """Held-out loss of texts, and what their ranks asked for."""
    model = tiny_model(seed=3)
    packs = list(pack_all(tiny_samples(tiny_processor(model), 4, ["text"]), 64))
    peers, asked = on_ranks(model.eval(), layout), list[str]()
    if isinstance(model.ask, AskSections):
        model.ask._asked = lambda component, *_: asked.append(component)
    losses = ot.serving(model, lambda: ot.heldout_loss(model, packs[peers.rank :: peers.size], peers))
    return losses and (losses["heads"]["text"]["loss"], asked)


def test_texts_ask_no_section_for_anything(ranks: RankPool) -> None:
    alone, _ = loss_of_texts("")
    *main, section = ranks.run(loss_of_texts, "vision1+dp2", timeout_s=60, world=3)
    assert main == [(pytest.approx(alone, rel=1e-6), [])] * 2
    assert section is None


def failing(case: str) -> str | None:
    """The error of this rank; then all ranks evaluate together as if nothing had been."""
    model = tiny_model(seed=3)
    packs = list(pack_all(tiny_samples(tiny_processor(model), 7), 160))
    peers = on_ranks(model.eval(), "vision1+dp2")
    message: str | None = None

    def fail(kind: type[Exception]) -> None:
        ot.heldout_loss(model, packs, peers)
        raise kind("no score today")

    try:
        if case == "not serving":
            ot.heldout_loss(model, packs, peers)
        elif case == "a forward on all ranks":
            model(packs[1])
        elif case == "a forward by itself":
            ot.serving(model, lambda: model(packs[1]))
        else:
            ot.serving(model, lambda: fail({"user": UserError, "other": KeyError}[case]))
    except (UserError, TrainingError, KeyError) as error:
        message = f"{type(error).__name__}: {error}"
    losses = ot.serving(model, lambda: ot.heldout_loss(model, packs, peers))
    assert (losses is None) == (dist.get_rank() == 2)
    return message


@pytest.mark.parametrize(
    ("case", "main", "section"),
    [
        ("user", "UserError: no score today", "UserError: no score today"),
        ("other", "KeyError: 'no score today'", "TrainingError: rank 0 failed: KeyError: 'no score today'"),
        ("not serving", "do not listen now; call omnitrain.serving", "rank 2 has only the components of the section"),
        ("a forward on all ranks", "image_encoder is on other ranks", "rank 2 has only the components of the section"),
        ("a forward by itself", "image_encoder is on other ranks, and a forward by", "image_encoder is on other ranks"),
    ],
)
def test_an_error_ends_all_ranks_and_leaves_none_waiting(ranks: RankPool, case: str, main: str, section: str) -> None:
    *of_main, of_section = ranks.run(failing, case, timeout_s=60, world=3)
    assert all(main in found for found in of_main), of_main
    assert section in of_section


def failing_encoder() -> None:
    model = tiny_model(seed=3)
    packs = list(pack_all(tiny_samples(tiny_processor(model), 7), 160))
    peers = on_ranks(model.eval(), "vision1+dp2")

    def fail(*arguments: Any) -> torch.Tensor:
        raise UserError("image 3 is broken")

    model.image_encoder.lm_encode = fail
    ot.serving(model, lambda: ot.heldout_loss(model, packs, peers))


def test_an_error_of_a_section_is_raised_on_the_ranks_that_asked(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"failed on 3 of 3 ranks[^$]*image 3 is broken"):
        ranks.run(failing_encoder, timeout_s=60, world=3)

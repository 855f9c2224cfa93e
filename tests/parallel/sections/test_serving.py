"""Evaluation and generation with encoders on ranks of their own: the losses and tokens of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import omnitrain as ot
from omnitrain.data.packing.fill_pack import pack_all
from omnitrain.errors import TrainingError, UserError
from omnitrain.models.omni.model import OmniModel
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
        losses: packs of the ranks in turn, all of them on the first rank, and texts alone.
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
    texts = list(pack_all([prompt for prompt in prompts if not prompt.spans], 160))
    peers = on_ranks(model.eval(), layout)
    own = range(peers.rank, len(prompts), peers.size)

    def work() -> Found:
        shares = [packs[peers.rank :: peers.size], packs if peers.rank == 0 else [], texts]
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
        (any_to_any, "vision1+dp2", 2),
        (any_to_any, "encoders1+pp2", 2),
        (any_to_any, "vision1+tp2", 2),
        (any_to_any, "audio1+vision2+dp1", 1),
        (any_to_any, "encoders2+dp2", 2),
        (deepstack, "vision1+dp2", 2),
        (deepstack, "vision1+pp2", 2),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_model_with_sections_says_and_writes_what_one_process_does(
    ranks: RankPool, make: Callable[[], Made], layout: str, num_main: int
) -> None:
    """Also if one rank has all packs, if no pack has media, and in a second evaluation."""
    (alone,) = evaluated(make, layout)
    assert alone is not None
    world = ot.parse_layout(layout).num_ranks
    made = ranks.run(evaluated, make, layout, 2, timeout_s=120, world=world)
    assert made[num_main:] == [[None, None]] * (world - num_main)
    for found in (one for of_rank in made[:num_main] for one in of_rank):
        for losses, expected in zip(found.losses[:2], alone.losses[:2], strict=True):
            assert losses == pytest.approx(expected, rel=1e-6)
        assert found.answers == {number: alone.answers[number] for number in found.answers}
    assert {number for of_rank in made[:num_main] for number in of_rank[0].answers} == set(alone.answers)

"""Decoders with ranks of their own train as one process: hidden states go there, and their losses come back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Sample
from omnitrain.errors import TrainingError, UserError
from omnitrain.models.components.outputs import OmniOutput
from omnitrain.models.foundation.encoded_pack import EncodedPack
from omnitrain.models.omni.generate import generate
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.loss.linear import LossTerm
from omnitrain.parallel.layout import layout_of
from omnitrain.parallel.parallelize import build_parallelize_model
from omnitrain.parallel.schedule.accumulate import accumulate_gradients
from omnitrain.parallel.schedule.heads import loss_columns
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.state import init_state_of
from omnitrain.parallel.step.plan import step_planner
from omnitrain.parallel.verify.run import micro_batches
from omnitrain.parallel.verify.verify import verify
from omnitrain.recipe.layout import Layout, parse_layout
from omnitrain.recipe.parallel import MAIN, Section
from omnitrain.train.evaluate.evaluate import heldout_loss
from tests.models.decoders import continuous
from tests.parallel.factories import any_to_any
from tests.parallel.laid_out import pack, samples
from tests.parallel.schedule.separate import factory
from tests.parallel.sections.test_training import planned
from tests.tiny import tiny_processor, tiny_row

pytestmark = pytest.mark.ranks
BOTH_ENDS = {"components": ["image_encoder", "image_decoder"], "ranks": 1}


def sectioned(main: str, **sections: Mapping[str, Any]) -> Layout:
    return replace(parse_layout(main), sections=tuple((name, Section(**of)) for name, of in sections.items()))


FAST: list[str | Layout] = ["image_decoder2+dp2.accum2", "image_decoder1.twice+dp1.accum2"]
FURTHER = ("dp2.accum3", "hsdp2x1.accum3.recompute", "pp2.accum4", "pp2.v2.accum4")
WORLD = ("pp2.dp2.accum3", "pp2.v2.dp2.accum4", "pp2.sp2.accum3", "pp2.dp2.zbv.accum4")
SLOW: list[str | Layout] = [
    *(f"image_decoder1+{main}" for main in ("tp2.accum2", "sp2.accum2", "cp2.accum2", "hsdp2x1.accum2.recompute")),
    *(f"image_decoder1.flight4+{main}" for main in ("pp2.v2.accum4", "pp2.zbv.accum4")),
    "image_decoder1+pp2.gpipe.accum3",
    "image_decoder1.slots1+audio_decoder1.twice+pp2.accum3",
    "image_decoder1+dp2.accum3.bf16_param",
    *(planned(f"image_decoder1+{main}", foundation={"schedule": {"extra_forwards": 1}}) for main in FURTHER),
    *(
        "vision1+image_decoder1+audio_decoder1+pp2.accum3",
        "image_decoder1+dp3.accum2",
        "image_decoder2+tp2.accum2.bf16",
    ),
    sectioned("dp2.accum3", media=BOTH_ENDS),
    sectioned("pp2.accum3", media=BOTH_ENDS | {"components": [*BOTH_ENDS["components"], "audio_decoder"], "ranks": 2}),
    planned("image_decoder2+dp2.accum2", image_decoder={"mode": "replicate"}, audio_encoder={"place": "world"}),
    planned("image_decoder1+pp2.dp2.accum3", audio_decoder={"place": "world"}),
    *(planned(word, image_decoder={"place": "world"}, audio_decoder={"place": "world"}) for word in WORLD),
]
CONTINUOUS: list[str | Layout] = ["image_decoder1+dp2.accum2", "image_decoder1+pp2.accum3", "image_decoder1+sp2"]


def require_equal(
    sections: RankPool, make: Callable[[], OmniModel], given: Sequence[Sample], layouts: Sequence[str | Layout]
) -> None:
    rows = verify(make, given, layouts, nproc=sections.nproc, timeout_s=240, pool=sections).rows
    assert [row for row in rows if row.status != "equal"] == []


def test_a_decoder_of_a_section_trains_as_one_process(sections: RankPool) -> None:
    require_equal(sections, any_to_any, samples(), FAST)


@pytest.mark.slow
def test_a_decoder_of_a_section_trains_as_one_process_beside_every_parallelism(sections: RankPool) -> None:
    require_equal(sections, factory("any_to_any", "all"), samples() * 2, SLOW)  # of four blocks


def with_frozen(part: str) -> OmniModel:
    model = any_to_any()
    model.get_submodule(part).requires_grad_(False)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("part", ["image_decoder", "image_decoder.embedding", "image_decoder.head", "foundation"])
def test_a_decoder_of_a_section_trains_beside_frozen_parts(sections: RankPool, part: str) -> None:
    require_equal(sections, partial(with_frozen, part), samples(), ["image_decoder2+dp2.accum2"])


@pytest.mark.slow
@pytest.mark.parametrize("decoder", ["flow head", "in context"])
def test_a_decoder_of_latents_trains_in_a_section_as_in_one_process(sections: RankPool, decoder: str) -> None:
    make = partial(continuous.build, decoder)
    require_equal(sections, make, continuous.samples(make()), CONTINUOUS)


def rows_of_losses(word: str, weight: float) -> tuple[dict[str, Tensor], float]:
    """Loss and samples of a pack -> the loss of each token, and a metric; and the part of the total loss."""
    plan = parse_layout(word).plan()
    state = init_state_of(plan)
    model = any_to_any().train()
    model.image_decoder.token_metrics = {"right": lambda logits, labels: (logits.argmax(-1) == labels).float()}
    packs = micro_batches(model, samples(), state.of_section(MAIN).dp_size, 2)
    model = build_parallelize_model(model, parallel_plan=plan, enable_mixed_precision=False)
    found: dict[str, Tensor] = {}

    def take(one: Pack, output: OmniOutput) -> None:
        for name, term in output.losses.items():
            columns = torch.stack([term.rows, *term.metrics.values()], dim=1)
            found[f"{name} of {one.info.ids}"] = columns
            assert len(term.rows) == term.count == len(output.read[name])

    own = packs[state.dp_rank] if state.section == MAIN else []
    weights = {"image_decoder": weight}
    loss = accumulate_gradients(model, step_planner(model)(own), loss_weights=weights, on_output=take)
    assert layout_of(model) is not None
    return found, float(loss)


def test_the_last_stage_gets_the_loss_of_each_token_and_its_metrics(sections: RankPool) -> None:
    of_ranks = sections.run(rows_of_losses, "image_decoder1+dp1", 0.5, timeout_s=120, world=2)
    ((expected, total),) = sections.run(rows_of_losses, "dp1", 0.5, timeout_s=120, world=1)
    (found, loss), (of_section, nothing) = of_ranks
    assert found.keys() == expected.keys() and any("image_decoder" in name for name in found)
    for name, columns in expected.items():
        torch.testing.assert_close(found[name], columns, rtol=1e-5, atol=1e-5)
    assert (of_section, nothing) == ({}, 0) and loss == pytest.approx(total, rel=1e-6)


def losses_and_refusal(word: str) -> tuple[dict[str, Any], str]:
    """Held-out losses of a layout, and why it does not generate."""
    plan = parse_layout(word).plan()
    state = init_state_of(plan)
    model = build_parallelize_model(any_to_any(), parallel_plan=plan, enable_mixed_precision=False)
    packs = [Pack.from_samples([sample]) for sample in samples()] if state.section == MAIN else []
    found = heldout_loss(model.eval(), packs[state.dp_rank :: state.dp_size])
    if not plan.sections:
        return found, ""
    processor = tiny_processor(any_to_any())
    prompts = [processor.prompt(tiny_row("text", 0), 0)] if state.section == MAIN else []
    with pytest.raises((UserError, TrainingError)) as refusal:
        generate(model, processor, prompts, max_new_tokens=1)
    return found, str(refusal.value)


@pytest.mark.parametrize("word", ["image_decoder2+dp2", pytest.param("image_decoder1+pp2", marks=pytest.mark.slow)])
def test_held_out_losses_of_a_decoder_of_a_section_are_those_of_one_process(sections: RankPool, word: str) -> None:
    world = parse_layout(word).num_ranks
    ((expected, _),) = sections.run(losses_and_refusal, "dp1", timeout_s=120, world=1)
    of_ranks = sections.run(losses_and_refusal, word, timeout_s=120, world=world)
    heads = of_ranks[0][0]["heads"]
    assert heads.keys() == expected["heads"].keys() >= {"image_decoder"}
    for name, values in expected["heads"].items():
        assert heads[name]["tokens"] == values["tokens"]
        assert heads[name]["loss"] == pytest.approx(values["loss"], rel=1e-5)
    assert all("image_decoder is in a section, where it computes losses" in why for _, why in of_ranks)


def test_hidden_states_for_other_ranks_are_in_the_output_of_a_forward() -> None:
    model, drawn = any_to_any(), pack("text_to_image")
    encoded = model.encode_media(EncodedPack(drawn, heads=["image_decoder", "audio_decoder"], apart=["image_decoder"]))
    output = model.run_heads(encoded, model.run_foundation(encoded))
    given = output.apart["image_decoder"]
    assert output.losses.keys() == {"text"} and output.hidden is not None
    assert torch.equal(given.read, drawn.targets["image_decoder"].predicted_from)
    assert torch.equal(given.states[given.here], output.hidden[0, given.read]) and given.states.requires_grad


def test_a_message_of_losses_has_the_metrics_that_the_decoder_names() -> None:
    rows, right = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0])
    term = LossTerm(rows.sum(), 2, rows, {"right": right, "rank": 2 * right})
    assert loss_columns("image_decoder", term, ("rank", "right")).tolist() == [[1.0, 0.0, 0.0], [2.0, 2.0, 1.0]]
    with pytest.raises(UserError, match=r"image_decoder: its loss has the metrics .*'right'.*`token_metrics` are \[\]"):
        loss_columns("image_decoder", term, ())

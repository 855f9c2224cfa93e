"""Sections that cannot work are refused before anything is changed, and the message says what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from pydantic import ValidationError

import omnitrain as ot
from omnitrain.errors import UserError
from omnitrain.parallel.resolve.plans import resolve_without_ranks
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.recipe import ParallelPlan
from tests.parallel.factories import any_to_any
from tests.parallel.schedule.separate import build


@pytest.fixture(scope="module")
def model() -> ot.OmniModel:
    return any_to_any()


def plan(
    sections: Mapping[str, Mapping[str, Any]],
    components: Mapping[str, Mapping[str, Any]] | None = None,
    **default: Any,
) -> ParallelPlan:
    """``sections``: settings; by default one rank for the image encoder."""
    given = {name: {"components": ["image_encoder"], "ranks": 1} | dict(own) for name, own in sections.items()}
    return ParallelPlan(sections=given, components=components or {}, default=default)


def lora(rank: int, alpha: float) -> dict[str, Any]:
    return {"lora": {"targets": ["**"], "rank": rank, "alpha": alpha}}


VISION = {"vision": {}}
OF_TWO = {"vision": {"ranks": 2}}
TOWER = {"a": {"components": ["image_encoder.tower"]}}
APART = TOWER | {"b": {"components": ["image_encoder.projector"]}}
CROSSED = {
    "a": {"components": ["image_encoder.tower", "audio_encoder.projector"]},
    "b": {"components": ["audio_encoder.tower", "image_encoder.projector"]},
}
BOTH = {"media": {"components": ["image_encoder", "audio_encoder"], "ranks": 2}}


@pytest.mark.parametrize(
    ("refused", "num_ranks", "message"),
    [
        (plan(VISION | {"other": {}}), 4, r"sections.other.components: image_encoder is named 2 times; .* one section"),
        (plan({"main": {}}), 3, r"sections.main: this name is that of the other ranks; use another one"),
        (
            plan({"vision": {"components": ["image_encodr"]}}),
            3,
            r"sections.vision.components: unknown .*`image_encoder",
        ),
        (
            plan({"text": {"components": ["foundation"]}}),
            3,
            r"found foundation, but it reads the packs, which are in `main`; remove it",
        ),
        (
            plan({"paint": {"components": ["image_decoder"], "micro_batch": 2}}),
            3,
            r"sections.paint.micro_batch: found 2, but image_decoder computes the loss of each micro-batch before its",
        ),
        (
            plan({"paint": {"components": ["image_decoder"], "ahead": 1}}, freeze=True),
            3,
            r"sections.paint.ahead: found 1, but image_decoder keeps what it encodes until the loss of the same step",
        ),
        (
            plan(APART | {"b": {"components": ["image_encoder.projector", "image_decoder"]}}),
            3,
            r"sections.b.components: found image_decoder beside a part of an encoder whose other part is in section a:",
        ),
        *(
            (
                plan({"paint": {"components": ["image_decoder"], "ranks": 2}}, {"image_decoder": {axis: 2}}),
                4,
                rf"image_decoder.{axis}: found 2, but a decoder of a section is only sharded",
            )
            for axis in ("tp", "ulysses", "ep")
        ),
        (
            plan({"a": {"components": ["image_encoder.tower", "image_encoder.projector"]}}),
            3,
            r"a.components: found image_encoder.tower and image_encoder.projector in one .*name image_encoder i",
        ),
        (
            plan({"a": {"components": ["image_encoder.projector"]}}),
            3,
            r"found image_encoder.projector, but image_encoder.tower is in `main`; name image_encoder.tower in a sec",
        ),
        (
            plan({"a": {"components": ["image_encoder.tower"]}, "b": {}}),
            3,
            r"found image_encoder.tower, but image_encoder is named as a whole, too; remove one",
        ),
        (
            plan({"a": {"components": ["image_decoder.tower"]}}),
            3,
            r"image_decoder.tower, but only encoders that the recipe adds have .* projector: audio_encoder, image_enc",
        ),
        (
            plan(CROSSED),
            3,
            r"sections.a.components: a and b read features of each other, and would wait .*name the towers in one sec",
        ),
        (plan(APART | {"b": APART["b"] | {"micro_batch": 2}}), 3, r"b.micro_batch: found 2, .*micro_batch 1; use the"),
        (plan(APART | {"b": APART["b"] | {"ahead": 1}}, freeze=True), 3, r"sections.b.ahead: found 1, .* same step"),
        (
            plan(TOWER, {"image_encoder.projector": {"place": "world"}}),
            3,
            r"image_encoder.projector.place: found world, but a projector runs where its features are used; remove it",
        ),
        (
            plan(TOWER, {"image_encoder.projector": {"encode": {"window": 2}}}),
            3,
            r"image_encoder.projector.encode.window: found 2, but a projector in `main` runs in the forwards",
        ),
        (
            plan(TOWER, {"image_encoder.projector": {"ulysses": 2}}, ulysses=2),
            3,
            r"image_encoder.projector.ulysses: found 2, but a projector has no attention; remove it",
        ),
        (
            plan(TOWER, {"image_encoder.tower": lora(2, 4), "image_encoder.projector": lora(2, 8)}),
            3,
            r"image_encoder.projector.lora: found rank 2 and alpha 8, but image_encoder.tower has rank 2 and alpha 4, ",
        ),
        (plan(APART | {"a": APART["a"] | {"in_flight": 1}}, pp=2), 4, r"sections.a.in_flight: found 1, .* for ever"),
        (plan({"vision": {"ranks": 3}}), 3, r"3 of 3 ranks are for vision, and none is left .* such as --nproc 4"),
        (
            plan(VISION, tp=2, dp_shard=2),
            4,
            r"on the ranks that sections leave, tp=2 needs a multiple of 2 ranks, found 3; .* start it with --nproc 5",
        ),
        (
            plan({"vision": {"ranks": 3}}, {"image_encoder": {"dp_replicate": 2}}),
            5,
            r"sections.vision.ranks: found 3, but image_encoder: dp_replicate=2 must divide dp; 1, 3 would fit",
        ),
        *(
            (
                plan(OF_TWO, {"image_encoder": {axis: 2}}),
                4,
                rf"image_encoder.{axis}: found 2, but components of a section have",
            )
            for axis in ("cp", "pp")
        ),
        (plan(OF_TWO, {"image_encoder": {"tp": 2}}), 4, r"image_encoder.tp: found 2, but transformers has no tensor"),
        *(
            (
                plan(VISION, {"image_encoder": fields}),
                3,
                rf"image_encoder.{key}: found .*, but .* encode",
            )
            for key, fields in (
                ("place", {"place": "local"}),
                ("encode.window", {"encode": {"window": 2}}),
                ("encode.feature_bytes", {"encode": {"feature_bytes": 9}}),
            )
        ),
        (plan(BOTH, {"audio_encoder": {"ulysses": 2}}), 4, r"no ranks share .* set ulysses or cp of image_encoder"),
        (
            plan({"vision": {"in_flight": 1}}, pp=2),
            3,
            r"vision.in_flight: found 1, .* wait for ever; allow more, or set enc",
        ),
        (
            plan({"vision": {"in_flight": 9}}, pp=2, schedule={"kind": "gpipe"}),
            3,
            r"sections.vision.in_flight: found 9, but the first stage needs the features of more windows",
        ),
        (
            plan({"vision": {"in_flight": 1}}, freeze=True),
            3,
            r"vision.in_flight: found 1, but the section trains nothing",
        ),
        (
            plan({"vision": {"encode_twice": True}}, freeze=True),
            3,
            r"encode_twice: found true, but the section trains no",
        ),
        (
            plan(VISION, {"foundation": {"schedule": {"extra_forwards": 1}}}),
            3,
            r"foundation.schedule.extra_forwards: found 1 with pp 1, .* decoders in sections, but there are none",
        ),
    ],
)
def test_a_section_that_cannot_work_is_refused_with_what_would(
    model: ot.OmniModel, refused: ParallelPlan, num_ranks: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        resolve_without_ranks(model, refused, mixed_precision=False, num_ranks=num_ranks)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"slots": 0}, r"sections.vision.slots\n.* greater than or equal to 1"),
        ({"ranks": 0}, r"sections.vision.ranks\n.* greater than or equal to 1"),
        ({"micro_batch": 0}, r"sections.vision.micro_batch\n.* greater than or equal to 1"),
        ({"components": []}, r"sections.vision.components\n.* at least 1 item"),
        ({"slotz": 1}, r"sections.vision.slotz\n"),
        (
            {"in_flight": 2, "encode_twice": True},
            r"in_flight\n.* but `encode_twice: true` keeps no activations; remove",
        ),
    ],
)
def test_a_setting_that_no_section_can_have_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        plan({"vision": settings})


@pytest.mark.parametrize(
    ("schedule", "least"), [(None, 2), ({"kind": "interleaved", "chunks": 2}, 4), ({"kind": "zbv"}, 4)]
)
def test_the_least_number_of_windows_in_flight_is_that_of_the_warm_up(
    schedule: dict[str, Any] | None, least: int
) -> None:
    model = build("any_to_any", "all")  # of four blocks
    for in_flight in range(1, least + 2):
        given = plan({"vision": {"in_flight": in_flight}}, pp=2, schedule=schedule)
        if in_flight < least:
            with pytest.raises(UserError, match=f"in_flight: found {in_flight}, but the first stage needs"):
                resolve_without_ranks(model, given, mixed_precision=False, num_ranks=3)
        else:
            resolve_without_ranks(model, given, mixed_precision=False, num_ranks=3)


def with_another_state(built: ParallelPlan, of_state: ParallelPlan | None) -> str:
    """The message with which ranks refuse a plan whose sections are not those of the parallel state."""
    with pytest.raises(UserError) as refusal:
        ot.init_parallel_state(sections=of_state)
        ot.build_parallelize_model(any_to_any(), parallel_plan=built, enable_mixed_precision=False)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("built", "of_state", "message"),
    [
        (
            plan(VISION),
            None,
            "sections: found vision with 1 rank, but the parallel state has none; call init_parallel_st",
        ),
        (
            ParallelPlan(),
            plan(VISION),
            "sections: found none, but the parallel state has vision with 1 rank; call init_",
        ),
        (
            plan(OF_TWO),
            plan(VISION),
            "sections: found vision with 2 ranks, but the parallel state has vision with 1 ran",
        ),
        (
            plan({"vision": {"ranks": 3}}),
            plan({"vision": {"ranks": 3}}),
            "3 of 3 ranks are for vision, and none is left",
        ),
    ],
)
def test_a_state_of_other_sections_is_refused_on_all_ranks(
    sections: RankPool, built: ParallelPlan, of_state: ParallelPlan | None, message: str
) -> None:
    assert all(message in found for found in sections.run(with_another_state, built, of_state, timeout_s=180, world=3))

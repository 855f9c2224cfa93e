"""Encoders that run outside of the forwards, under every other parallelism and training: a covering array.

``python -m tests.parallel.schedule.separate`` writes the table ``separate.tsv`` again: every possible pair of values
stands in it at least once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
from transformers import PreTrainedModel

from omnitrain.models.adapters.lora import add_lora, find_in_all
from omnitrain.models.contract.tiny_model import init_peaked_
from omnitrain.models.hf.load import foundation_class
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.model import OmniModel
from omnitrain.recipe import ComponentPlan, ParallelPlan
from omnitrain.recipe.layout import Layout, parse_layout
from omnitrain.recipe.plan_groups import Lora
from tests.covering import PRECISIONS, covering, pairs_in_fp32
from tests.families import FAMILIES
from tests.models.staged import with_layers
from tests.parallel.schedule.pipelines import build as build_pipeline
from tests.tiny import FOUNDATION, tiny_model

C = TypeVar("C", bound=Any)  # a named tuple with `cost` and `reference`
TABLE = Path(__file__).with_name("separate.tsv")
MODELS = {
    "qwen3_vl": ("image_encoder",),
    "qwen3_vl_moe": ("image_encoder",),
    "qwen2_5_omni_thinker": ("image_encoder", "audio_encoder"),
    "internvl": ("image_encoder",),
    "any_to_any": ("image_encoder", "audio_encoder"),
}
PLACES = ("local", "group", "world")
WINDOWS = ("", "1", "2", "step")
STAGES = ("", "pp2", "pp2.v2")
AXES = ("", "dp2", "sp2", "cp2", "tp2", "tp4", "dp2.ep2")  # with tp4, the tower is on two of the four ranks
TRAINED = ("all", "frozen", "lora", "projector", "encoder")
MEMORY = ("", "cpu")
MICRO_BATCHES = 3  # a window of two is followed by a smaller one
# transformers plans tensor parallelism for the foundation alone; the tower's attention fixes its number of heads.
TP_PLAN = {f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"} | {"layers.*.self_attn.o_proj": "rowwise"}
TP_PLAN |= {f"layers.*.mlp.{name}_proj": "colwise" for name in ("gate", "up")} | {"layers.*.mlp.down_proj": "rowwise"}
TP_PLAN |= {"layer.*.mlp.fc1": "colwise", "layer.*.mlp.fc2": "rowwise"}
ENCODERS = re.compile(r"visual|audio_tower|vision_tower|multi_modal_projector|image_encoder|audio_encoder")
PROJECTORS = re.compile(r"merger|projector|audio_tower\.proj\.")


class Case(NamedTuple):
    """A model whose encoders have a place, a window and a memory; the empty word leaves a field unset.

    Attributes:
        model: name of the family.
        place: the rank that encodes an item.
        window: number of micro-batches of a window.
        stages: the pipeline.
        axis: another parallelism.
        trained: the parameters that are trained: all, all but the encoders, adapters of all components, projectors
            alone, or encoders alone.
        memory: where features wait.
        precision: the dtypes of all components.
    """

    model: str
    place: str
    window: str
    stages: str
    axis: str
    trained: str
    memory: str
    precision: str

    @property
    def is_separate(self) -> bool:
        """Whether the encoders run outside of the forwards of micro-batches."""
        return self.window in ("2", "step") or (self.stages != "" and self.place == "world")

    @property
    def cost(self) -> int:
        """Of a test: its ranks, which take longer with adapters, or encoders in the foundation."""
        return self.layout.num_ranks * (1 if self.model == "any_to_any" else 2) * (2 if self.trained == "lora" else 1)

    @property
    def reference(self) -> tuple[str, ...]:
        """What the run in one process depends on, with which it is compared."""
        return self.model, self.trained

    @property
    def layout(self) -> Separate:
        words = (self.stages, self.axis, f"accum{MICRO_BATCHES}", self.precision)
        return Separate(**vars(parse_layout(".".join(filter(None, words)))), case=self)


@dataclass(frozen=True)
class Separate(Layout):
    """A layout whose encoders have fields of their own."""

    case: Case = field(kw_only=True)

    def plan(self) -> ParallelPlan:
        window = int(self.case.window) if self.case.window.isdecimal() else self.case.window or None
        is_part = self.case.axis == "tp4"
        encoder = ComponentPlan(
            place=self.case.place,
            encode={"window": window, "features_on": self.case.memory or None},
            tp=2 if is_part else None,
        )
        components = dict.fromkeys(MODELS[self.case.model], encoder)
        return super().plan().model_copy(update={"components": components, "tp_plan": TP_PLAN if is_part else None})

    def __str__(self) -> str:
        return " ".join(word or "-" for word in self.case)


def why_impossible(case: Case) -> str:
    """Why no model trains so, or nothing."""
    if case.axis == "tp2" and case.model in ("qwen3_vl", "qwen3_vl_moe"):
        return "transformers has no tensor parallel plan for its layers"
    if case.axis == "tp4" and case.model != "internvl":
        return "the globs are for this tower"
    if case.axis == "dp2.ep2" and case.model != "qwen3_vl_moe":
        return "it has no experts"
    if case.window and case.stages and case.place != "world":
        return "the forwards of the first stage encode"
    if case.window in ("2", "step") and case.place == "local":
        return "place: local divides no items"
    if case.window in ("2", "step") and case.place == "group" and case.axis not in ("sp2", "cp2", "tp2", "tp4"):
        return "no other rank has the sample"
    return "no features wait" if case.memory and not case.is_separate else ""


def possible() -> list[Case]:
    cases = (Case(*values) for values in product(MODELS, PLACES, WINDOWS, STAGES, AXES, TRAINED, MEMORY, PRECISIONS))
    return [case for case in cases if not why_impossible(case)]


def table() -> list[Case]:
    return [Case(*line.split("\t")) for line in TABLE.read_text().splitlines()]


def each_value(cases: Sequence[C]) -> list[list[C]]:
    """Take the case with the most values for its cost that no earlier case has, until every value has one.

    Return the cases with one reference together: it is computed once, and takes about as long as four ranks.
    """
    missing = {value for case in cases for value in enumerate(case)}
    cost = {case: case.cost for case in cases}
    taken: dict[tuple[str, ...], list[C]] = {}

    def gain(case: C) -> float:
        return len(missing.intersection(enumerate(case))) / (cost[case] + 4 * (case.reference not in taken))

    while missing:
        best = max(cases, key=gain)
        missing -= set(enumerate(best))
        taken.setdefault(best.reference, []).append(best)
    return list(taken.values())


def in_turn(groups: Sequence[list[C]], first: int) -> list[Any]:
    """Parameters of a test for groups of :func:`each_value`; all but the ``first`` and cheapest are second cases."""
    groups = sorted(groups, key=lambda cases: sum(case.cost for case in cases))
    marks = [() if index < first else pytest.mark.second for index in range(len(groups))]
    return [
        pytest.param(cases, id=" ".join(cases[0].reference), marks=mark)
        for cases, mark in zip(groups, marks, strict=True)
    ]


def internvl(heads: int) -> PreTrainedModel:
    """InternVL with four blocks and so many heads, for several tensor parallel ranks."""
    config = with_layers(FAMILIES["internvl"]())
    text = config.get_text_config(decoder=True)
    text.num_attention_heads = text.num_key_value_heads = heads
    model = foundation_class(config)(config)
    init_peaked_(model)
    return model


def build(name: str, trained: str) -> PreTrainedModel | OmniModel:
    """The family with four blocks, of which some parameters are trained."""
    is_native = name != "any_to_any"
    if name == "internvl":
        model = internvl(heads=4)
    else:
        model = build_pipeline(name) if is_native else tiny_model(foundation=FOUNDATION | {"num_hidden_layers": 4})
    if trained == "lora":
        omni = build_omni_model(foundation=model) if is_native else model
        add_lora(omni, find_in_all(omni, ("foundation", *MODELS[name]), Lora(targets=["*"], rank=3)))
        return omni
    for path, parameter in model.named_parameters():
        of_encoder, of_projector = bool(ENCODERS.search(path)), bool(PROJECTORS.search(path))
        if not {"all": True, "frozen": not of_encoder, "encoder": of_encoder, "projector": of_projector}[trained]:
            parameter.requires_grad_(False)
    return model


def factory(name: str, trained: str) -> partial[PreTrainedModel | OmniModel]:
    return partial(build, name, trained)


if __name__ == "__main__":
    TABLE.write_text("".join("\t".join(case) + "\n" for case in covering(possible(), pairs_in_fp32)))

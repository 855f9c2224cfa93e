"""Encoders with ranks of their own, beside every other parallelism and training: a covering array.

``python -m tests.parallel.sections.layouts`` writes the table ``layouts.tsv`` again: every possible pair of values
stands in it at least once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import NamedTuple

from omnitrain.data.packing.sample import Sample
from omnitrain.recipe import ComponentPlan, ParallelPlan
from omnitrain.recipe.layout import Layout, parse_layout
from tests.parallel.factories import any_to_any
from tests.parallel.schedule.pipelines import covering
from tests.parallel.schedule.separate import MICRO_BATCHES
from tests.parallel.schedule.test_layouts import samples_of
from tests.tiny import TASKS, tiny_processor, tiny_samples

TABLE = Path(__file__).with_name("layouts.tsv")
MODELS = ("any_to_any", "qwen3_vl", "qwen2_5_omni_thinker")
PLACES = ("own", "world", "local")
TOWERS = ("", "together", "apart")
TRAINED = ("all", "frozen", "lora")
FAN_OUT = ("1", "2", "4")
MAIN = ("dp2", "tp2", "sp2", "pp2")
SETTINGS = ("", "twice", "window2", "slots1", "flight2")
MEMORY = ("", "recompute")
DATA = ("mixed", "audio", "text")


class Case(NamedTuple):
    """A model with a section or two.

    Attributes:
        model: name of the family.
        image: where the image encoder is: on ranks of its own, or in ``main`` with this ``place``.
        audio: the same of the audio encoder; empty: the model has none.
        towers: whether both encoders share a section, if both have one.
        trained: the parameters that are trained: all, all but the encoders, or adapters of all components.
        fan_out: number of ranks of the first stage of ``main`` for each rank of a section.
        main: the parallelism of ``main``.
        settings: of the sections.
        memory: of all components.
        data: the media of the step.
    """

    model: str
    image: str
    audio: str
    towers: str
    trained: str
    fan_out: str
    main: str
    settings: str
    memory: str
    data: str

    @property
    def layout(self) -> Sectioned:
        fan_out = int(self.fan_out)
        section_ranks = 2 if fan_out == 1 and self.main != "pp2" else 1
        data_ranks = fan_out * section_ranks // (2 if self.main in ("tp2", "sp2") else 1)
        axis = self.main if self.main != "dp2" else ""
        main = ".".join(filter(None, (axis, f"dp{data_ranks}", self.memory, f"accum{MICRO_BATCHES}")))
        names = {"together": ["encoders"], "apart": ["vision", "audio"]}.get(self.towers)
        names = names or (["vision"] if self.image == "own" else ["audio"])
        settings = f".{self.settings}" if self.settings else ""
        sections = "".join(f"{name}{section_ranks}{settings}+" for name in names)
        return Sectioned(**vars(parse_layout(sections + main)), case=self)


@dataclass(frozen=True)
class Sectioned(Layout):
    """A layout with sections, in which encoders of ``main`` have a place."""

    case: Case = field(kw_only=True)

    def plan(self) -> ParallelPlan:
        places = {"image_encoder": self.case.image, "audio_encoder": self.case.audio}
        components = {n: ComponentPlan(place=place) for n, place in places.items() if place in ("world", "local")}
        return super().plan().model_copy(update={"components": components})

    def __str__(self) -> str:
        return " ".join(word or "-" for word in self.case)


def why_impossible(case: Case) -> str:
    """Why no model trains so, or nothing."""
    if (case.audio == "") != (case.model == "qwen3_vl"):
        return "only this family has no audio encoder"
    if (case.image == case.audio == "own") != (case.towers != ""):
        return "two sections need two encoders"
    if "own" not in (case.image, case.audio):
        return "no section"
    if case.main == "tp2" and case.model == "qwen3_vl":
        return "transformers has no tensor parallel plan for its layers"
    if case.main == "pp2" and case.fan_out == "4":
        return "nine ranks"
    if case.settings in ("twice", "flight2") and case.trained == "frozen":
        return "no backward"
    return "it reads no audio" if case.data == "audio" and not case.audio else ""


def possible() -> list[Case]:
    fields = (MODELS, PLACES, (*PLACES, ""), TOWERS, TRAINED, FAN_OUT, MAIN, SETTINGS, MEMORY, DATA)
    return [case for values in product(*fields) if not why_impossible(case := Case(*values))]


def table() -> list[Case]:
    return [Case(*line.split("\t")) for line in TABLE.read_text().splitlines()]


def samples(model: str, data: str) -> list[Sample]:
    """Samples of a model with all media, with audio and without media, or without media."""
    every = samples_of(model) if model != "any_to_any" else tiny_samples(tiny_processor(any_to_any()), 2 * len(TASKS))
    if data == "mixed":
        return every
    allowed = {"audio_encoder", "foundation.audio"} if data == "audio" else set()
    return [s for s in every if {span.component for span in s.spans if not span.is_target} <= allowed]


if __name__ == "__main__":
    TABLE.write_text("".join("\t".join(case) + "\n" for case in covering(possible())))

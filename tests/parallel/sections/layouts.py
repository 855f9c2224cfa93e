"""Encoders with ranks of their own, beside every other parallelism and training: a covering array.

``python -m tests.parallel.sections.layouts`` writes the table ``layouts.tsv`` again: every possible pair of values
stands in it at least once, and so do the places of the encoders with each parallelism of ``main`` and each media.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from omnitrain.data.packing.sample import Sample
from omnitrain.recipe import ComponentPlan, ParallelPlan
from omnitrain.recipe.layout import Layout, parse_layout
from tests.covering import PRECISIONS, covering, pairs_in_fp32
from tests.parallel.factories import any_to_any
from tests.parallel.schedule.separate import MICRO_BATCHES
from tests.parallel.schedule.test_layouts import samples_of
from tests.tiny import TASKS, tiny_processor, tiny_samples

TABLE = Path(__file__).with_name("layouts.tsv")
MODELS = ("any_to_any", "qwen3_vl", "qwen2_5_omni_thinker")
# Where image and audio encoder are: on ranks of their own (with a `+`: of one section), or in `main` with this `place`.
# Of a divided encoder, the `tower` is on ranks of its own, and the projector in `main`.
ENCODERS = ("own+own", "own own", "own world", "own local", "world own", "local own", "tower own", "tower local")
ALONE = "own"  # the model has no audio encoder
TRAINED = ("all", "frozen", "lora")
FAN_OUT = ("1", "2", "4")
MAIN = ("dp2", "tp2", "sp2", "pp2")
SETTINGS = ("", "twice", "window2", "slots1", "flight2", "ahead")
MEMORY = ("", "recompute")
DATA = ("mixed", "audio", "text")


class Case(NamedTuple):
    """A model with a section or two.

    Attributes:
        model: name of the family.
        encoders: where its encoders are.
        trained: the parameters that are trained: all, all but the encoders, or adapters of all components.
        fan_out: number of ranks of the first stage of ``main`` for each rank of a section.
        main: the parallelism of ``main``.
        settings: of the sections.
        memory: of all components.
        data: the media of the step.
        precision: the dtypes of all components.
    """

    model: str
    encoders: str
    trained: str
    fan_out: str
    main: str
    settings: str
    memory: str
    data: str
    precision: str

    @property
    def layout(self) -> Sectioned:
        fan_out = int(self.fan_out)
        section_ranks = 2 if fan_out == 1 and self.main != "pp2" else 1
        data_ranks = fan_out * section_ranks // (2 if self.main in ("tp2", "sp2") else 1)
        axis = self.main if self.main != "dp2" else ""
        main = ".".join(filter(None, (axis, f"dp{data_ranks}", self.memory, f"accum{MICRO_BATCHES}", self.precision)))
        words = {"own": "", "tower": "_tower"}
        places = zip(("vision", "audio"), self.encoders.split(), strict=False)
        names = [name + words[place] for name, place in places if place in words] or ["encoders"]
        settings = f".{self.settings}" if self.settings else ""
        sections = "".join(f"{name}{section_ranks}{settings}+" for name in names)
        return Sectioned(**vars(parse_layout(sections + main)), case=self)

    @property
    def cost(self) -> int:
        """Of a test: ranks that build the model, which takes longer with adapters, or encoders in the foundation."""
        return self.layout.num_ranks * (1 if self.model == "any_to_any" else 2) * (2 if self.trained == "lora" else 1)

    @property
    def reference(self) -> tuple[str, ...]:
        """What the run in one process depends on, with which it is compared."""
        return self.model, self.trained, self.data, "divided" if "tower" in self.encoders else "whole"


@dataclass(frozen=True)
class Sectioned(Layout):
    """A layout with sections, in which encoders of ``main`` have a place."""

    case: Case = field(kw_only=True)

    def plan(self) -> ParallelPlan:
        places = dict(zip(("image_encoder", "audio_encoder"), self.case.encoders.split(), strict=False))
        components = {n: ComponentPlan(place=place) for n, place in places.items() if place in ("world", "local")}
        return super().plan().model_copy(update={"components": components})

    def __str__(self) -> str:
        return ", ".join(word or "-" for word in self.case)


def why_impossible(case: Case) -> str:
    """Why no model trains so, or nothing."""
    if (case.encoders == ALONE) != (case.model == "qwen3_vl"):
        return "only this family has no audio encoder"
    if case.encoders.startswith("tower") and case.model != "any_to_any":
        return "its encoders lie inside the foundation"
    if case.main == "tp2" and case.model == "qwen3_vl":
        return "transformers has no tensor parallel plan for its layers"
    if case.main == "pp2" and case.fan_out == "4":
        return "nine ranks"
    if case.settings in ("twice", "flight2") and case.trained == "frozen":
        return "no backward"
    if case.settings == "ahead" and case.trained != "frozen":
        return "the next step needs new weights"
    return "it reads no audio" if case.data == "audio" and case.encoders == ALONE else ""


def possible() -> list[Case]:
    fields = (MODELS, (*ENCODERS, ALONE), TRAINED, FAN_OUT, MAIN, SETTINGS, MEMORY, DATA, PRECISIONS)
    return [case for values in product(*fields) if not why_impossible(case := Case(*values))]


def combinations_in(case: Case) -> set[Any]:
    """The pairs of its values, and the three of them that decide who waits for whom."""
    return pairs_in_fp32(case) | ({(case.encoders, case.main, case.data)} if not case.precision else set())


def table() -> list[Case]:
    return [Case(*line.split("\t")) for line in TABLE.read_text().splitlines()]


@cache
def samples(model: str, data: str) -> list[Sample]:
    """Samples of a model with all media, with audio and without media, or without media."""
    if data == "mixed":
        return samples_of(model)
    every = samples_of(model) if model != "any_to_any" else tiny_samples(tiny_processor(any_to_any()), 2 * len(TASKS))
    allowed = {"audio_encoder", "foundation.audio"} if data == "audio" else set()
    return [s for s in every if {span.component for span in s.spans if not span.is_target} <= allowed]


if __name__ == "__main__":
    TABLE.write_text("".join("\t".join(case) + "\n" for case in covering(possible(), combinations_in)))

"""Students on any ranks, from teachers on any ranks, learn as in one process: a covering array of their parallelism."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, product
from typing import NamedTuple

import pytest

from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.verify.verify import verify
from omnitrain.recipe import ComponentPlan, ParallelPlan
from omnitrain.recipe.layout import Layout, parse_layout
from omnitrain.recipe.parallel import Section
from tests import tiny
from tests.covering import covering
from tests.parallel.sections.test_distillation import JSD, PADDED, TOP, teacher
from tests.parallel.sections.test_teachers import texts
from tests.tiny import tiny_model

pytestmark = pytest.mark.ranks
STUDENTS = ("dp2", "tp2", "pp2", "sp2", "cp2", "ep2")
PLACES = ("beside", "world", "section")  # `beside`: on the student's ranks, each for samples that it holds
TEACHERS = ("dp", "tp2", "ulysses2", "ep2")
# With one teacher, of as many classes as the student; with two, of more and of fewer.
NUMBERS = ("one", "two")


class Case(NamedTuple):
    student: str
    place: str
    taught_on: str  # the parallelism of each teacher
    number: str

    @property
    def model(self) -> tuple[bool, bool, bool]:
        """Whether the student has experts, the teachers have them, and there are two."""
        return self.student == "ep2", self.taught_on == "ep2", self.number == "two"

    @property
    def layout(self) -> Distilled:
        words = f"{self.student.replace('ep2', 'dp2.ep2')}.accum4"
        return Distilled(**vars(parse_layout(words)), case=self)


@dataclass(frozen=True)
class Distilled(Layout):
    """A layout whose teachers have a place and degrees of their own."""

    case: Case = field(kw_only=True)

    @property
    def num_ranks(self) -> int:
        return super().num_ranks + 2 * (self.case.place == "section")

    def plan(self) -> ParallelPlan:
        names, case = ["big", "wise"][: 1 + (self.case.number == "two")], self.case
        degree = {} if case.taught_on == "dp" else {case.taught_on[:-1]: 2}
        place = {"place": "world"} if case.place == "world" else {}
        sections = {"taught": Section(components=names, ranks=2)} if case.place == "section" else {}
        components = {name: ComponentPlan(**degree, **place) for name in names}
        return super().plan().model_copy(update={"components": components, "sections": sections})

    def __str__(self) -> str:
        return ", ".join(self.case)


def why_impossible(case: Case) -> str:
    """Why no student learns so, or nothing."""
    if case.place != "section" and case.taught_on not in ("dp", case.student.replace("sp", "ulysses")):
        return "on the ranks of the student, a teacher has its degrees"
    return "ranks that share samples are not all" if (case.place, case.taught_on) == ("world", "ulysses2") else ""


def possible() -> list[Case]:
    cases = [Case(*values) for values in product(STUDENTS, PLACES, TEACHERS, NUMBERS)]
    return [case for case in cases if not why_impossible(case)]


def taught(experts: bool, taught_by_experts: bool, by_two: bool) -> OmniModel:
    more = tiny.EXPERTS if taught_by_experts else {}
    teachers = {"big": teacher(JSD, 1, vocab_size=300 if by_two else PADDED["vocab_size"], **more)}
    if by_two:
        teachers["wise"] = teacher(TOP, 2, vocab_size=272, tie_word_embeddings=False, **more)
    foundation = PADDED | (tiny.EXPERTS if experts else {})
    return tiny_model(encoders={}, decoders={}, foundation=foundation, teachers=teachers)


TABLE = sorted(covering(possible()), key=lambda case: case.model)
DEFAULT = [Case("pp2", "section", "tp2", "two"), Case("pp2", "world", "dp", "two")]


def require_equal(sections: RankPool, cases: list[Case]) -> None:
    layouts = [case.layout for case in cases]
    report = verify(partial(taught, *cases[0].model), texts(12), layouts, nproc=4, timeout_s=120, pool=sections)
    assert {row.layout: row.status for row in report.rows} == dict.fromkeys(map(str, layouts), "equal"), str(report)
    assert max(row.grad_error for row in report.rows) <= 1e-5, str(report)


def test_students_of_a_pipeline_learn_as_in_one_process(sections: RankPool) -> None:
    require_equal(sections, DEFAULT)


def deep() -> OmniModel:
    foundation = PADDED | {"num_hidden_layers": 4}
    return tiny_model(encoders={}, decoders={}, foundation=foundation, teachers={"big": teacher(JSD, 1)})


@pytest.mark.slow
def test_the_last_stage_may_be_on_any_rank_of_the_pipeline(sections: RankPool) -> None:
    layouts = ["pp2.v2.accum4", "pp2.v2.zbv.accum4", "big1+pp2.v2.zbv.accum4", "big1.ahead.window2.slots1+pp2.accum3"]
    report = verify(deep, texts(12), layouts, nproc=4, timeout_s=120, pool=sections)
    assert [row.status for row in report.rows] == ["equal"] * len(layouts), str(report)


@pytest.mark.slow
@pytest.mark.parametrize("cases", [[*same] for _, same in groupby(TABLE, key=lambda case: case.model)], ids=str)
def test_every_pair_of_student_and_teacher_learns_as_in_one_process(sections: RankPool, cases: list[Case]) -> None:
    require_equal(sections, cases)

"""Models and layouts of pipelines: a covering array, in which every possible pair of values stands at least once.

``python -m tests.parallel.schedule.pipelines`` writes the table ``pipelines.tsv`` again.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedModel

from omnitrain.models.adapters.lora import add_lora, find_adapters
from omnitrain.models.contract.tiny_model import init_peaked_
from omnitrain.models.hf.load import foundation_class
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.model import OmniModel
from omnitrain.recipe.plan_groups import Lora
from tests.covering import PRECISIONS, covering, pairs_in_fp32
from tests.families import FAMILIES
from tests.models.staged import with_layers
from tests.parallel import factories

TABLE = Path(__file__).with_name("pipelines.tsv")
BLOCKS = 4
# Expert parallelism can share their experts; llama4's compute in code of their own.
EXPERTS = (
    "qwen3_moe",
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "qwen3_next",
    "qwen3_vl_moe",
    "ernie4_5_vl_moe",
    "gemma4_moe",
    "qwen3_omni_moe_thinker",
)
# transformers has a tensor parallel plan for their layers, and their heads divide by two.
TENSOR = ("qwen3", "deepseek_v3", "gemma3", "internvl", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker", "qwen3_5")
# Their layers cannot be repeated: keys and values of one serve others.
AS_THEY_ARE = ("gemma4", "gemma4_moe")
OTHERS = ("any_to_any", "qwen3_vl with LoRA", "frozen qwen3_vl")
MODELS = (*FAMILIES, *OTHERS)
SCHEDULES = ("pp2", "pp2.v2", "pp2.zbv", "pp4")
AXES = ("", "dp2", "sp2", "cp2", "tp2", "dp2.ep2")
MEMORY = ("", "recompute")
STEPS = ("", "accum2")


class Case(NamedTuple):
    """One layout of one model."""

    model: str
    schedule: str
    axis: str
    memory: str
    steps: str
    precision: str

    @property
    def layout(self) -> str:
        return ".".join(filter(None, (self.schedule, self.axis, self.memory, self.steps, self.precision)))


def is_possible(case: Case) -> bool:
    """Whether the model has blocks for all stages, experts for ep, and a tensor parallel plan for tp."""
    if case.model in ("any_to_any", *AS_THEY_ARE) and case.schedule != "pp2":
        return False
    if "ep2" in case.axis and case.model not in EXPERTS:
        return False
    return case.axis != "tp2" or case.model in TENSOR


def possible() -> list[Case]:
    fields = (MODELS, SCHEDULES, AXES, MEMORY, STEPS, PRECISIONS[:2])
    return [case for values in product(*fields) if is_possible(case := Case(*values))]


def table() -> list[Case]:
    return [Case(*line.split("\t")) for line in TABLE.read_text().splitlines()]


def build(name: str) -> PreTrainedModel:
    family = name.removeprefix("frozen ").removesuffix(" with LoRA")
    if family not in FAMILIES:
        return getattr(factories, name)()
    config = FAMILIES[family]() if family in AS_THEY_ARE else with_layers(FAMILIES[family](), BLOCKS)
    model = foundation_class(config)(config)
    init_peaked_(model)
    if name.startswith("frozen "):
        for path, parameter in model.named_parameters():
            parameter.requires_grad_("visual" in path)
    if not name.endswith(" with LoRA"):
        return model
    omni: OmniModel = build_omni_model(foundation=model)
    add_lora(
        omni, {"foundation": find_adapters(omni, "foundation", Lora(targets=["q_proj", "o_proj", "up_proj"], rank=3))}
    )
    return omni


def factory(name: str) -> partial[PreTrainedModel]:
    return partial(build, name)


if __name__ == "__main__":
    TABLE.write_text("".join("\t".join(case) + "\n" for case in covering(possible(), pairs_in_fp32)))

"""What works with a whole HuggingFace model: one cell for each feature, measured on a small copy of the model."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import PreTrainedModel

from omnitrain.data.packing.sample import Sample
from omnitrain.errors import UserError
from omnitrain.models.components.contract import Contract, StageContract
from omnitrain.models.contract.cache import cached
from omnitrain.models.contract.tiny_model import tiny_configs
from omnitrain.models.contract.trial import Failure, Trial, attempt
from omnitrain.models.omni.save import save_whole
from omnitrain.ops.experts.weights import experts_in
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.verify.arguments import Factory, build_with
from omnitrain.parallel.verify.reference import omni
from omnitrain.parallel.verify.tiny_model import TinyModel
from omnitrain.parallel.verify.verify import VerifyRow, verify
from omnitrain.peers import SINGLE_PROCESS
from omnitrain.recipe.layout import parse_layout
from omnitrain.recipe.parallel import FOUNDATION, ComponentPlan, ParallelPlan
from omnitrain.recipe.plan_groups import Lora

EQUAL, FALLBACK, NONE, REFUSED, WRONG = "equal", "fallback", "-", "refused", "wrong"
EXPERTS = "experts"
LAYOUTS: Mapping[str, ParallelPlan] = {
    "FSDP": parse_layout("dp2").plan(),
    "tensor parallel": parse_layout("tp2").plan(),
    "Ulysses": parse_layout("sp2").plan(),
    EXPERTS: parse_layout("dp2.ep2").plan(),
    "bf16": parse_layout("dp2.bf16").plan(),
    "LoRA": ParallelPlan(
        default=parse_layout("dp2").plan().default, components={FOUNDATION: ComponentPlan(lora=Lora())}
    ),
}
COLUMNS = ("one process", "loss", "pipeline", "export", *LAYOUTS)
_RESULTS = {"equal": EQUAL, "refused": REFUSED, "different": WRONG}  # of a row of `verify`


@dataclass(frozen=True)
class CoverageCell:
    """What a feature does: ``equal``, ``fallback``, ``refused``, ``wrong`` or ``-`` (nothing to compare), and why."""

    result: str
    why: str = ""


@dataclass(frozen=True)
class Coverage:
    """Component -> how it reads its media, and column (:data:`COLUMNS`) -> its cell."""

    components: dict[str, str] = field(default_factory=dict)
    cells: dict[str, CoverageCell] = field(default_factory=dict)


def coverage_of(model: PreTrainedModel) -> Coverage:
    """Measure a HF model, also on ``meta``, on a copy with its widths and few layers; or return what was measured.

    Two ranks are started. Raises UserError: the model cannot train, or its copy does not fit into the memory.
    """
    return cached(model, ".coverage.json", Coverage, lambda: _measured(model))


def _measured(model: PreTrainedModel) -> Coverage:
    for config in tiny_configs(model.config):
        tiny = TinyModel(type(model), config, frozenset(), {}, {}, None)
        try:
            contract = omni(tiny()).runner.contract
            break
        except UserError as error:
            refusal = error
    else:
        raise refusal
    with Trial.of(type(model), config, contract) as trial:
        samples = [probe.sample for probe in trial.probes if not isinstance(attempt(trial.run_plain, probe), Failure)]
    with RankPool(2, preload=("omnitrain.parallel.verify.verify",)) as pool:
        return measure(tiny, samples, pool)


def measure(factory: Factory, samples: Sequence[Sample], pool: RankPool) -> Coverage:
    """Measure the small model of a factory in one process and on two ranks, on samples of all its modalities.

    Raises UserError: the model cannot train.
    """
    model = omni(build_with(factory))
    native, contract = model.runner.native, model.runner.contract
    components = dict.fromkeys(native.components, "own component")
    components |= dict.fromkeys(native.in_forward, "in the model's own forward")
    components |= {modality: f"refused: {why}" for modality, why in native.refused.items()}
    cells = {
        "one process": _of_contract(contract, unread=(*native.in_forward, *native.refused)),
        "loss": _of_loss(contract),
        "pipeline": _of_stages(model.stage_contract),
        "export": _of_export(model.foundation),
    }
    plans = {name: plan for name, plan in LAYOUTS.items() if name != EXPERTS or any(experts_in(model))}
    rows = verify(factory, samples, list(plans.values()), nproc=2, pool=pool).rows
    cells |= {name: _of_row(row) for name, row in zip(plans, rows, strict=True)}
    return Coverage(components, {name: cells.get(name, CoverageCell(NONE)) for name in COLUMNS})


def _of_contract(contract: Contract, unread: Sequence[str]) -> CoverageCell:
    """Packed training against plain transformers, as the contract check found it."""
    facts = [f"{one.check}: {one.fact}" for one in contract.findings if one.outcome != "passed"]
    falls_back = bool(unread) or any(one.outcome == "fallback" for one in contract.findings)
    return CoverageCell(FALLBACK if falls_back else EQUAL, "; ".join(facts))


def _of_loss(contract: Contract) -> CoverageCell:
    head = next(one for one in contract.findings if one.check == "head")
    return CoverageCell(EQUAL if head.outcome == "passed" else FALLBACK, head.fact)


def _of_stages(stages: StageContract) -> CoverageCell:
    if stages.problem:
        return CoverageCell(REFUSED, stages.problem)
    if not stages.refused:
        return CoverageCell(EQUAL)
    return CoverageCell(FALLBACK, f"cuts refused before block {', '.join(map(str, stages.refused))}")


def _of_export(model: PreTrainedModel) -> CoverageCell:
    """Whether transformers reads the very weights from the files that we write."""
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with TemporaryDirectory() as folder:
        save_whole(copy.deepcopy(model), Path(folder), SINGLE_PROCESS)
        found = attempt(type(model).from_pretrained, folder, dtype=torch.float32)
    if isinstance(found, Failure):
        return CoverageCell(WRONG, f"transformers cannot read it: {found}")
    read = found.state_dict()
    wrong = [n for n, tensor in expected.items() if n not in read or not torch.equal(read[n], tensor)]
    return CoverageCell(WRONG, f"{len(wrong)} tensors differ, such as {wrong[0]}") if wrong else CoverageCell(EQUAL)


def _of_row(row: VerifyRow) -> CoverageCell:
    return CoverageCell(_RESULTS[row.status], row.reason)

"""The models of random layouts, as omnitrain builds them on every rank."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from omnitrain.data.packing.sample import Sample
from omnitrain.models.adapters.lora import add_lora, find_in_all
from omnitrain.models.contract.samples import Probe, probe_samples
from omnitrain.models.contract.tiny_model import init_peaked_
from omnitrain.models.hf.load import foundation_class
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.model import OmniModel
from tests.families import FAMILIES, UNSHRINKABLE
from tests.models.staged import with_layers
from tests.parallel.random_layouts.rows import TRAINED, Row
from tests.parallel.sections.test_teachers import EXPERTS, TEACHER, distilled
from tests.tiny import FOUNDATION, MODEL, TASKS, tiny_model, tiny_processor, tiny_samples

CONFIGS = FAMILIES | UNSHRINKABLE


@dataclass(frozen=True)
class Example:
    """A sample, and what plain transformers takes of it; nothing for models of several parts."""

    sample: Sample
    arguments: Mapping[str, Tensor]


def foundation_of(row: Row) -> PreTrainedModel:
    """The language model of a family of transformers, with peaked weights."""
    config = CONFIGS[row.model]() if row.blocks == 2 else with_layers(CONFIGS[row.model](), row.blocks)
    model = foundation_class(config)(config)
    init_peaked_(model)
    return model


def parts_of(row: Row) -> dict[str, Any]:
    """Arguments of :func:`build_omni_model` for a model of several parts."""
    foundation = {"foundation": FOUNDATION | {"num_hidden_layers": row.blocks}}
    if row.model.startswith("taught"):
        teacher = TEACHER if row.model == "taught" else EXPERTS
        return foundation | {"encoders": {}, "decoders": {}, "teachers": {"big": dict(teacher)}}
    return MODEL | foundation | ({} if row.model == "any_to_any" else {"decoders": {}})


def is_family(row: Row) -> bool:
    return row.model in CONFIGS


def bare(row: Row) -> OmniModel:
    """The model without adapters; all its parameters train."""
    if is_family(row):
        return build_omni_model(foundation=foundation_of(row)).train()
    model = tiny_model(**parts_of(row)).train()
    if row.model.startswith("taught"):
        model.runner.loss_function = distilled
    return model


def build(row: Row) -> OmniModel:
    """The model of a row before it is spread, with the adapters and frozen parameters that its plan does not set."""
    model, trained = bare(row), TRAINED[row.trained]
    if trained.lora:
        add_lora(model, find_in_all(model, _whole(row, trained.lora), trained.adapters))
        generator = torch.Generator().manual_seed(1)
        for name in sorted(model.adapter_names):
            model.get_parameter(name).data.normal_(std=0.1, generator=generator)
    _freeze(model, _whole(row, trained.held))
    return model


def build_as_planned(row: Row) -> OmniModel:
    """The model with what its plan sets, too, in one process."""
    model, trained = build(row), TRAINED[row.trained]
    if trained.planned:
        add_lora(model, find_in_all(model, _whole(row, trained.planned), trained.adapters))
    _freeze(model, _whole(row, trained.frozen))
    return model


def _whole(row: Row, kinds: Collection[str]) -> list[str]:
    """The components of these kinds; towers with their projectors."""
    return list(dict.fromkeys(name.partition(".")[0] for name in row.components(kinds)))


def _freeze(model: OmniModel, components: Collection[str]) -> None:
    for name in components:
        for parameter in model.components[name].values():
            parameter.requires_grad_(False)


def examples_of(model: OmniModel, row: Row) -> list[Example]:
    """Samples of all modalities; some without a trained token, and texts with other words."""
    if is_family(row):
        probes = [
            taken for probe in probe_samples(model.foundation, model.runner.native) if (taken := _taken(model, probe))
        ]
        found = [Example(probe.sample, probe.arguments) for probe in probes]
    else:
        tasks = ["text"] if row.model.startswith("taught") else TASKS if row.model == "any_to_any" else TASKS[:5]
        found = [Example(sample, {}) for sample in tiny_samples(tiny_processor(model), 2 * len(tasks) + 3, tasks)]
    silent = found[-1]
    return [*found, Example(replace(silent.sample, loss_mask=np.zeros_like(silent.sample.loss_mask)), silent.arguments)]


def _taken(model: OmniModel, probe: Probe) -> Probe | None:
    """The probe, or None: some models refuse images and videos in one sample."""
    return probe if len(set(probe.modalities)) < 2 or "ernie" not in type(model.foundation).__name__.lower() else None


def kinds_of(examples: Sequence[Example]) -> list[str]:
    """``text``, ``media`` or ``silent`` of each."""
    return [
        "silent"
        if not example.sample.loss_mask[1:].any() and not any(span.is_target for span in example.sample.spans)
        else "media"
        if example.sample.spans
        else "text"
        for example in examples
    ]


def samples_in(examples: Sequence[Example], cells: Sequence[Sequence[Sequence[int]]]) -> list[Example]:
    """All examples of a step."""
    return [examples[number] for of_rank in cells for pack in of_rank for number in pack]

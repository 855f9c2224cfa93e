"""Shrink a model that is too large to verify on this machine: same widths, fewer layers, experts, vocabulary rows."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from omnitrain.data.packing.pack import IGNORED
from omnitrain.data.packing.sample import Sample
from omnitrain.errors import UserError
from omnitrain.models.adapters.lora import Adapters, adapters_of, adapters_within, add_lora
from omnitrain.models.contract.tiny_model import build_tiny_model, moved_tokens, sizes, tiny_config, tower_config
from omnitrain.models.discovery import refusing
from omnitrain.models.hf.load import as_config, as_dict
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.environment import available_memory
from omnitrain.recipe.component_configs import OmniConfig

# fp32 numbers per parameter. On a rank: weight, gradient, momentum, previous weight and three results (gradient,
# weight, movement); FSDP's buffers add three. In the comparing process: the model, one run with those seven, the
# results of three runs (reference, reference in another order, a layout), and one pickled copy of results.
# Verifying 33 M parameters on 4 ranks took 8.3 GB; this formula gives 7.7 GB.
_ON_A_RANK = 7 + 3
_IN_THE_COMPARISON = 1 + 7 + 3 * 3 + 1
_GIB = 2**30


def needed_memory(parameters: int, ranks: int) -> int:
    """Return the bytes that verifying a model takes, in addition to the memory of idle processes."""
    return 4 * parameters * (_ON_A_RANK * ranks + _IN_THE_COMPARISON)


def fits(model: PreTrainedModel, ranks: int, memory: float | None) -> bool:
    """Whether a model, also on ``meta``, can be verified by so many ranks in ``memory`` bytes; None: unlimited."""
    return memory is None or needed_memory(num_parameters(model), ranks) <= memory


def num_parameters(model: PreTrainedModel) -> int:
    """Return the number of elements of all parameters, tied ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


@dataclass(frozen=True, eq=False)  # configurations have no hash
class TinyModel:
    """A picklable factory of a model with new random weights, the same in every process."""

    model_class: type[PreTrainedModel]  # class of the model
    config: PreTrainedConfig  # config of the tiny size
    frozen: frozenset[str]  # names of the frozen parameters
    adapters: Mapping[str, Adapters]  # component -> its LoRA adapters, limited to matrices that the tiny model has
    tokens: Mapping[int, int]  # special token id of the full model -> its id in the tiny model
    rows: int | None  # number of ordinary token ids, ``0 .. rows - 1``; None: token ids stay unchanged.

    def __call__(self) -> PreTrainedModel:
        """Build the model, fp32 on the CPU."""
        model = build_tiny_model(self.model_class, self.config)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and name not in self.frozen)
        if isinstance(model, OmniModel):
            add_lora(model, adapters_within(model, self.adapters))
        return model

    def sample(self, sample: Any) -> Any:
        """Return a copy of a :class:`Sample`, or of HF-style arguments, with the token ids of the tiny model."""
        if self.rows is None:
            return sample
        if isinstance(sample, Sample):
            return replace(sample, input_ids=self._ids(sample.input_ids))
        ids = {name: torch.from_numpy(self._ids(np.asarray(sample[name]))) for name in ("input_ids", "labels")}
        return {**sample, **ids}

    def _ids(self, ids: np.ndarray) -> np.ndarray:
        assert self.rows is not None
        small = np.where(ids == IGNORED, IGNORED, ids % self.rows)
        for old, new in self.tokens.items():
            small[ids == old] = new
        return small


def tiny_model_of(model: PreTrainedModel, ranks: int, memory: float | None = None) -> TinyModel | None:
    """Return a smaller stand-in for a model that is too large or on the meta device; None: verify the model itself.

    Hidden widths stay; see :func:`tiny_config`. Towers keep their first layers. A model on the meta device that is
    small enough keeps its size and gets random weights. ``ranks``, ``memory``: see :func:`fits`; None: measured, or
    unlimited if the machine does not report it. Raises UserError: the smaller model is too large, too.
    """
    memory = available_memory() if memory is None else memory
    if fits(model, ranks, memory):
        return _tiny_model_of(model, model.config) if model.device.type == "meta" else None
    tiny = _tiny_model_of(model, _small(model))
    with refusing(f"no small {type(model).__name__} can be built, by which this one is verified"), torch.device("meta"):
        shapes = tiny.model_class(copy.deepcopy(tiny.config))
    if not fits(shapes, ranks, memory):
        assert memory is not None
        least = needed_memory(num_parameters(shapes), ranks)
        raise UserError(
            f"the model is too large to verify on this machine: found {memory / _GIB:.1f} GiB, expected "
            f"{least / _GIB:.1f} GiB for its smallest size ({num_parameters(shapes):,} parameters) on {ranks} ranks; "
            "use fewer ranks (nproc), or a narrower model, such as model.foundation.config.hidden_size=128"
        )
    return tiny


def described(model: PreTrainedModel, full: PreTrainedModel) -> str:
    """Describe the size of ``model``, compared to the full model."""
    if num_parameters(model) == num_parameters(full):
        drawn = ", with random weights" if full.device.type == "meta" else ""
        return f"{num_parameters(model):,} parameters{drawn}"
    whole = sizes(_foundation(full))
    counts = [
        f"{count:,} of {whole[what]:,} {what}"
        for what, count in sizes(_foundation(model)).items()
        if count < whole[what]
    ]
    counts.append(f"{num_parameters(model):,} of {num_parameters(full):,} parameters")
    return f"too large for this machine; verified at full width with {', '.join(counts)}"


def _foundation(model: PreTrainedModel) -> PreTrainedConfig:
    return model.foundation.config if isinstance(model, OmniModel) else model.config


def _small(model: PreTrainedModel) -> PreTrainedConfig:
    config = tiny_config(_foundation(model), cut_mlps=False)
    if not isinstance(model, OmniModel):
        return config
    encoders = {name: as_dict(encoder.config) for name, encoder in model.encoders.items()}
    for encoder in encoders.values():
        if encoder.get("tower"):
            encoder["tower"] = as_dict(tower_config(as_config(encoder["tower"])))
    teachers = {name: encoders.pop(name) for name in model.teachers}
    for teacher in teachers.values():
        teacher["model"] = as_dict(tiny_config(as_config(teacher["model"]), cut_mlps=False))
    return OmniConfig(foundation=as_dict(config), encoders=encoders, decoders=model.config.decoders, teachers=teachers)


def _tiny_model_of(model: PreTrainedModel, config: PreTrainedConfig) -> TinyModel:
    full = _foundation(model)
    small = as_config(config.foundation or {}) if isinstance(config, OmniConfig) else config
    tokens, rows = moved_tokens(full, small), None
    if sizes(small)["vocabulary rows"] < sizes(full)["vocabulary rows"]:
        rows = sizes(small)["vocabulary rows"] - len(tokens)
    frozen = frozenset(name for name, parameter in model.named_parameters() if not parameter.requires_grad)
    adapters = adapters_of(model) if isinstance(model, OmniModel) else {}
    return TinyModel(type(model), config, frozen, adapters, tokens, rows)

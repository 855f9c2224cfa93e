"""Check that ranks may share the sequence of a tower's call: blocks must give the same for slices as for the whole.

As in :mod:`omnitrain.models.contract.checks_sequence`, a tiny model runs whole calls first, then slices of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from omnitrain.data.packing.pack import Pack
from omnitrain.models.components.contract import Contract
from omnitrain.models.contract.cache import contract_path
from omnitrain.models.contract.checks_packing import TOLERANCE
from omnitrain.models.contract.checks_sequence import SequenceContract, first_without_problem, kept_or_checked
from omnitrain.models.contract.harness import Recorded, Replayed, relative, worst
from omnitrain.models.contract.samples import probe_samples
from omnitrain.models.contract.tiny_model import build_tiny_model, tiny_config, tower_config
from omnitrain.models.discovery import discover
from omnitrain.models.foundation.runner import FoundationRunner
from omnitrain.models.foundation.shared_tower import SharedTower
from omnitrain.models.hf.load import as_config, as_dict
from omnitrain.ops.attention.install import use_omnitrain_attention
from omnitrain.plan.sequence import split_sequence

_NUM_SLICES = 3
_NUM_ITEMS = 3

Encode = Callable[[], Sequence[Tensor]]


def native_tower_contract(model: PreTrainedModel, contract: Contract, component: str) -> SequenceContract:
    """Return the contract of a component inside a foundation, from the cache or by checking a tiny model.

    Args:
        model: the foundation.
        contract: the foundation's contract, by which the tiny model runs.
        component: name of a component that :func:`~omnitrain.models.discovery.discover` finds in the foundation.
    """
    path = contract_path(type(model), model.config).with_suffix(f".{component}.json")
    return kept_or_checked(path, partial(check_native_tower, type(model), model.config, contract, component))


def attached_tower_contract(encoder: PreTrainedModel) -> SequenceContract:
    """Return the contract of an attached encoder, from the cache or by checking a tiny model."""
    path = contract_path(type(encoder), encoder.config).with_suffix(".tower.json")
    return kept_or_checked(path, partial(check_attached_tower, type(encoder), encoder.config))


def check_native_tower(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, contract: Contract, component: str
) -> SequenceContract:
    """Check a tiny model of a foundation's ``config``; if it has a problem, check one with all layers of its towers."""

    def measured(cuts: dict[str, bool]) -> SequenceContract:
        model = build_tiny_model(model_class, tiny_config(config, **cuts))
        native = discover(model)
        runner = FoundationRunner(model.train(), contract, native=native)
        names = {modality for modality, interface in native.interfaces.items() if interface.component == component}
        samples = [probe.sample for probe in probe_samples(model, native) if names & set(probe.modalities)]
        packs = [Pack.from_samples([sample]) for sample in samples]
        parameters = [model.get_parameter(path) for path in native.components[component]]

        def encode() -> list[Tensor]:
            encoded = [runner.encode(pack) for pack in packs]
            return [tensor for media in encoded for features in media.values() for tensor in features.tensors()]

        return _measured(model, parameters, encode)

    return first_without_problem(partial(measured, cuts) for cuts in ({}, {"cut_towers": False}))


def check_attached_tower(encoder_class: type[PreTrainedModel], config: PreTrainedConfig) -> SequenceContract:
    """Check a tiny model of an encoder; if it has a problem, check one with all layers."""

    def measured(tower: Callable[[PreTrainedConfig], PreTrainedConfig]) -> SequenceContract:
        values = as_dict(config)
        if values.get("tower"):
            values["tower"] = as_dict(tower(as_config(values["tower"])))
        encoder: Any = build_tiny_model(encoder_class, as_config(values)).train()
        use_omnitrain_attention(encoder)
        features, num_tokens = encoder.minimal_input()
        generator = torch.Generator().manual_seed(0)
        items = {name: torch.cat([tensor] * _NUM_ITEMS) for name, tensor in features.items()}
        for name, tensor in items.items():
            if tensor.is_floating_point():
                items[name] = torch.randn(tensor.shape, generator=generator)
        return _measured(encoder, encoder.parameters(), lambda: [encoder.lm_encode(items, num_tokens * _NUM_ITEMS)])

    return first_without_problem(partial(measured, tower) for tower in (tower_config, lambda whole: whole))


def _measured(model: nn.Module, parameters: Any, encode: Encode) -> SequenceContract:
    calls = _Calls()
    tower = SharedTower(model, parameters, calls)
    if not tower.num_stacks:
        return SequenceContract("it has no list of blocks")
    with tower.sharing():
        whole = encode()
    if not any(call.attended for call in calls.recorded):
        return SequenceContract("its blocks do not take all items as one sequence [rows, width] with their cu_seqlens")
    heads = tuple(sorted({num_heads for call in calls.recorded for num_heads in call.heads}))
    for index in range(_NUM_SLICES):
        calls.start(index)
        with tower.sharing():
            encoded = encode()
        errors = [relative(got, expected) for got, expected in zip(encoded, whole, strict=True)]
        error = worst([*errors, *(e for call in calls.replayed for e in call.errors)])
        if not error <= TOLERANCE:
            fact = f"features of a slice of its sequence differ by {error:.1e} of the largest from those of the whole"
            return SequenceContract(fact, heads)
    return SequenceContract("", heads)


class _Calls:
    """The calls of all stacks of blocks while encoding, in order: first whole, then slices of the same calls."""

    def __init__(self) -> None:
        self.recorded: list[Recorded] = []
        self.replayed: list[Replayed] = []
        self._slice: int | None = None

    def start(self, index: int) -> None:
        """Let the next encoding run slice ``index``."""
        self._slice = index
        self.replayed = []

    def __call__(self, num_rows: int, device: torch.device) -> Recorded | Replayed:
        if self._slice is None:
            self.recorded.append(Recorded(num_rows))
            return self.recorded[-1]
        whole = self.recorded[len(self.replayed)]
        positions = split_sequence(num_rows, sp=_NUM_SLICES).positions[self._slice]
        self.replayed.append(Replayed(whole, torch.from_numpy(positions)))
        return self.replayed[-1]

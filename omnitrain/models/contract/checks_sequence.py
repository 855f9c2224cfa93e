"""Check that ranks may share a sequence: a slice must give the same logits as the whole.

The tiny model runs a whole sequence, and we record the inputs and outputs of all attentions and recurrent layers. Then
it runs slices of that sequence, in which these layers return the recorded outputs. Their inputs, and the logits, must
equal those of the whole. A model that counts its tokens, or looks at its neighbours, fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from omnitrain.data.packing.pack import Pack
from omnitrain.models.components.contract import Contract
from omnitrain.models.contract.cache import cached
from omnitrain.models.contract.checks_packing import TOLERANCE
from omnitrain.models.contract.tiny_model import build_tiny_model, tiny_config, tiny_configs, tower_config
from omnitrain.models.contract.trial import Failure, ReplayedSlice, Trial, WholeSequence, attempt, relative, worst
from omnitrain.models.foundation.encoded_pack import EncodedPack
from omnitrain.models.foundation.sequence_slice import cut_pack, local_positions
from omnitrain.models.foundation.shared_tower import SharedTower
from omnitrain.models.hf.load import as_config, as_dict
from omnitrain.ops.attention.install import use_omnitrain_attention
from omnitrain.plan.sequence import split_sequence

_SPLITS = ({"sp": 3}, {"sp": 1, "cp": 2})


@dataclass(frozen=True)
class SequenceContract:
    """The result of the check."""

    problem: str = ""  # why ranks may not share the sequence; empty: they may
    heads: tuple[int, ...] = ()  # numbers of query heads of the model's attentions


def sequence_contract_of(model: PreTrainedModel, contract: Contract) -> SequenceContract:
    """Return whether ranks may share a foundation's sequences, from the cache or by a tiny model under ``contract``."""
    check = partial(check_sequence, type(model), model.config, contract)
    return cached(model, ".sequence.json", SequenceContract, check)


def check_sequence(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, contract: Contract
) -> SequenceContract:
    """Check a tiny model of ``config``; if it has a problem, check one with all layers of towers and full MLPs."""
    if contract.attention == "native":
        return SequenceContract("it keeps its own attention, which sees only the tokens of one rank")
    small, _, whole = tiny_configs(config)
    return first_without_problem(partial(_measured, model_class, tiny, contract) for tiny in (small, whole))


def first_without_problem(measures: Iterable[Callable[[], SequenceContract]]) -> SequenceContract:
    """Run ``measures`` until one finds no problem, and return the last result."""
    contract = SequenceContract()
    for measure in measures:
        with torch.random.fork_rng(devices=[]):
            measured = attempt(measure)
        contract = SequenceContract(f"it fails: {measured}") if isinstance(measured, Failure) else measured
        if not contract.problem:
            break
    return contract


@torch.no_grad()
def _measured(model_class: type[PreTrainedModel], config: PreTrainedConfig, contract: Contract) -> SequenceContract:
    heads: set[int] = set()
    with Trial.of(model_class, config, contract) as trial:
        for pack in trial.packs:
            encoded, whole = trial.encoded(pack), WholeSequence(pack.num_tokens)
            logits = _logits(trial, encoded, whole)
            heads |= whole.heads
            for positions in (each for by in _SPLITS for each in split_sequence(pack.num_tokens, **by).positions):
                part = ReplayedSlice(whole, torch.from_numpy(positions))
                found = _logits(trial, encoded, part)
                error = worst([relative(found, logits[part.positions]), *part.errors])
                if not error <= TOLERANCE:
                    fact = f"logits of a slice differ by {error:.1e} of the largest from those of the whole"
                    return SequenceContract(fact, tuple(sorted(heads)))
    return SequenceContract("", tuple(sorted(heads)))


def _logits(trial: Trial, encoded: EncodedPack, sequence_slice: Any) -> Tensor:
    """The logits of a slice, with the features whose placeholders lie in it, which are in the order of placeholders."""
    pack, native, interfaces = encoded.pack, encoded.native, trial.native.interfaces
    ids = pack.input_ids[0].cpu()
    at = {name: (ids == interfaces[name].token_id).nonzero()[:, 0] for name in native}
    rows = {name: features.at(local_positions(sequence_slice, at[name])[0]) for name, features in native.items()}
    sliced = {name: features for name, features in rows.items() if len(features.main)}
    packed = trial.runner.packed_sequence_of(pack, sequence_slice)
    return trial.logits(EncodedPack(cut_pack(pack, sequence_slice), sliced), packed)


_NUM_SLICES = 3
_NUM_ITEMS = 3


def native_tower_contract(model: PreTrainedModel, contract: Contract, component: str) -> SequenceContract:
    """Return the contract of a component of a foundation, from the cache or by a tiny model run by ``contract``."""
    check = partial(check_native_tower, type(model), model.config, contract, component)
    return cached(model, f".{component}.json", SequenceContract, check)


def attached_tower_contract(encoder: PreTrainedModel) -> SequenceContract:
    """Return the contract of an attached encoder, from the cache or by checking a tiny model."""
    check = partial(_check_attached_tower, type(encoder), encoder.config)
    return cached(encoder, ".tower.json", SequenceContract, check)


def check_native_tower(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, contract: Contract, component: str
) -> SequenceContract:
    """Check a tiny model of a foundation's ``config``; if it has a problem, check one with all layers of its towers."""

    def measured(tiny: PreTrainedConfig) -> SequenceContract:
        with Trial.of(model_class, tiny, contract) as trial:
            interfaces = trial.native.interfaces.items()
            names = {modality for modality, interface in interfaces if interface.component == component}
            probes = [probe for probe in trial.probes if names & set(probe.modalities)]
            packs = [Pack.from_samples([probe.sample]) for probe in probes]
            parameters = [trial.ours.get_parameter(path) for path in trial.native.components[component]]

            def encode() -> list[Tensor]:
                encoded = [trial.runner.encode(pack) for pack in packs]
                return [tensor for media in encoded for features in media.values() for tensor in features.tensors()]

            return _measured_tower(trial.ours, parameters, encode)

    return first_without_problem(partial(measured, tiny_config(config, cut_towers=cut)) for cut in (True, False))


def _check_attached_tower(encoder_class: type[PreTrainedModel], config: PreTrainedConfig) -> SequenceContract:
    """Check a tiny model of an encoder; if it has a problem, check one with all layers."""

    def measured(cut_tower: bool) -> SequenceContract:
        values = as_dict(config)
        if cut_tower and values.get("tower"):
            values["tower"] = as_dict(tower_config(as_config(values["tower"])))
        encoder: Any = build_tiny_model(encoder_class, as_config(values)).train()
        use_omnitrain_attention(encoder)
        features, num_tokens = encoder.minimal_input()
        generator = torch.Generator().manual_seed(0)
        items = {name: torch.cat([tensor] * _NUM_ITEMS) for name, tensor in features.items()}
        for name, tensor in items.items():
            if tensor.is_floating_point():
                items[name] = torch.randn(tensor.shape, generator=generator)
        return _measured_tower(
            encoder, encoder.parameters(), lambda: [encoder.lm_encode(items, num_tokens * _NUM_ITEMS)]
        )

    return first_without_problem(partial(measured, cut) for cut in (True, False))


@torch.no_grad()
def _measured_tower(model: nn.Module, parameters: Any, encode: Callable[[], Sequence[Tensor]]) -> SequenceContract:
    """Encode whole, then in slices of the same calls of all stacks of blocks, in order."""
    recorded: list[WholeSequence] = []
    replayed: list[ReplayedSlice] = []
    part = -1

    def slice_of(num_rows: int, device: torch.device) -> WholeSequence | ReplayedSlice:
        if part < 0:
            recorded.append(WholeSequence(num_rows))
            return recorded[-1]
        positions = split_sequence(num_rows, sp=_NUM_SLICES).positions[part]
        replayed.append(ReplayedSlice(recorded[len(replayed)], torch.from_numpy(positions)))
        return replayed[-1]

    tower = SharedTower(model, parameters, slice_of)
    if not tower.stacks:
        return SequenceContract("it has no list of blocks")
    with tower.sharing():
        whole = encode()
    if not any(call.attended for call in recorded):
        return SequenceContract("its blocks do not take all items as one sequence [rows, width] with their cu_seqlens")
    heads = tuple(sorted({num_heads for call in recorded for num_heads in call.heads}))
    for index in range(_NUM_SLICES):
        part = index
        replayed.clear()
        with tower.sharing():
            errors = [relative(*pair) for pair in zip(encode(), whole, strict=True)]
        error = worst([*errors, *(error for call in replayed for error in call.errors)])
        if not error <= TOLERANCE:
            fact = f"features of a slice of its sequence differ by {error:.1e} of the largest from those of the whole"
            return SequenceContract(fact, heads)
    return SequenceContract("", heads)

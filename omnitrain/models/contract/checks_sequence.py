"""Check that ranks may share a sequence: a slice must give the same logits as the whole.

The tiny model runs a whole sequence, and we record the inputs and outputs of all attentions and recurrent layers. Then
it runs slices of that sequence, in which these layers return the recorded outputs. Their inputs, and the logits, must
equal those of the whole. A model that counts its tokens, or looks at its neighbours, fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from omnitrain.data.packing.pack import Pack
from omnitrain.models.components.contract import Contract
from omnitrain.models.contract.cache import cached
from omnitrain.models.contract.checks_packing import TOLERANCE
from omnitrain.models.contract.tiny_model import tiny_configs
from omnitrain.models.contract.trial import Failure, ReplayedSlice, Trial, WholeSequence, attempt, relative, worst
from omnitrain.models.foundation.runner import EncodedMedia
from omnitrain.models.foundation.sequence_slice import cut_pack, local_positions
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
            media, whole = trial.media(pack), WholeSequence(pack.num_tokens)
            logits = _logits(trial, pack, media, whole)
            heads |= whole.heads
            for positions in (each for by in _SPLITS for each in split_sequence(pack.num_tokens, **by).positions):
                part = ReplayedSlice(whole, torch.from_numpy(positions))
                found = _logits(trial, pack, media, part)
                error = worst([relative(found, logits[part.positions]), *part.errors])
                if not error <= TOLERANCE:
                    fact = f"logits of a slice differ by {error:.1e} of the largest from those of the whole"
                    return SequenceContract(fact, tuple(sorted(heads)))
    return SequenceContract("", tuple(sorted(heads)))


def _logits(trial: Trial, pack: Pack, media: EncodedMedia, sequence_slice: Any) -> Tensor:
    """The logits of a slice, with the features whose placeholders lie in it, which are in the order of placeholders."""
    ids, interfaces = pack.input_ids[0].cpu(), trial.native.interfaces
    at = {name: (ids == interfaces[name].token_id).nonzero()[:, 0] for name in media.native}
    rows = {name: features.at(local_positions(sequence_slice, at[name])[0]) for name, features in media.native.items()}
    sliced = EncodedMedia({name: features for name, features in rows.items() if len(features.main)})
    return trial.logits(cut_pack(pack, sequence_slice), sliced, trial.runner.packed_sequence_of(pack, sequence_slice))

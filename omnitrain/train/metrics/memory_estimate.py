"""How much memory a pack keeps for its backward: measured on small packs, told for full ones before the run.

What autograd saves grows linearly with the tokens of a pack, with the tokens that are predicted, and with the numbers
that encoders read: attention that is fused keeps no scores. So a few small packs tell what a pack keeps that is full of
anything, one long video or a hundred images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from omnitrain.data.loader import first_samples
from omnitrain.data.pack import Pack
from omnitrain.data.processor import OmniProcessor
from omnitrain.data.rows import RowSource
from omnitrain.data.sample import Sample
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.step.plan import facts_of

_COPIES = (1, 2)  # of each sample, for a slope


@dataclass(frozen=True)
class KeptMemory:
    """Bytes that a micro-batch keeps for its backward.

    Attributes:
        constant: whatever is in it.
        per_unit: what is counted in a pack -> bytes for each of it.
    """

    constant: float
    per_unit: Mapping[str, float]

    def of(self, pack: Pack) -> float:
        """Bytes that ``pack`` keeps."""
        return self.constant + sum(number * self.per_unit[unit] for unit, number in _units(pack).items())

    def of_full_packs(self, samples: Sequence[Sample], pack_tokens: int) -> dict[str, float]:
        """Source of each sample -> bytes that a pack keeps which is full of rows like it; the most, where several.

        Args:
            samples: one of each kind.
            pack_tokens: length of a pack.
        """
        largest: dict[str, float] = {}
        for sample in samples:
            grows = self.of(Pack.from_samples([sample])) - self.constant
            full = self.constant + grows * pack_tokens / len(sample)
            largest[sample.source] = max(full, largest.get(sample.source, 0.0))
        return largest


def kept_by_source(
    model: OmniModel, processor: OmniProcessor, sources: Sequence[RowSource], pack_tokens: int
) -> dict[str, float]:
    """Source -> bytes that a pack keeps which is full of its rows, measured on the first of each kind.

    Args:
        model: see :func:`measure_kept_memory`.
        processor: of the model.
        sources: data sets.
        pack_tokens: length of a pack; rows of which no two fit are left out.
    """
    firsts = first_samples(sources, processor)
    found = [first for _, first in firsts if isinstance(first, Sample)]
    samples = [first for first in found if 2 * len(first) <= pack_tokens and not first.is_alone]
    return measure_kept_memory(model, samples).of_full_packs(samples, pack_tokens) if samples else {}


def measure_kept_memory(model: OmniModel, samples: Sequence[Sample]) -> KeptMemory:
    """Run the forward of small packs and count what autograd saves.

    Args:
        model: on its device, in training mode; of one process, not compiled. Weights and gradients stay as they are.
        samples: at least one with each kind of media that packs will have; two of the same make a pack.
    """
    _kept(model, Pack.from_samples(samples[:1]))  # what a first forward finds out and keeps is not of a pack
    few, many = ([Pack.from_samples([sample] * copies) for sample in samples] for copies in _COPIES)
    units = [_units(pack) for pack in few]
    names = list(dict.fromkeys(chain.from_iterable(units)))
    counts = np.array([[found.get(name, 0) for name in names] for found in units]) / _COPIES[0]
    kept = np.array([[_kept(model, pack) for pack in packs] for packs in (few, many)], dtype=np.float64)
    slopes = (kept[1] - kept[0]) / (_COPIES[1] - _COPIES[0])
    scale = counts.max(axis=0)
    solved, *_ = np.linalg.lstsq(counts / scale, slopes, rcond=None)
    return KeptMemory(
        constant=float((kept[0] - _COPIES[0] * slopes).max()),
        per_unit=dict(zip(names, (solved / scale).tolist(), strict=True)),
    )


def _units(pack: Pack) -> dict[str, float]:
    """What the memory of a pack grows with, as the step plan counts it."""
    facts = facts_of(pack)
    read = {f"numbers of {name}": float(sum(item.cost for item in items)) for name, items in facts.items.items()}
    return {"tokens": float(sum(facts.lengths)), **read}


def _kept(model: OmniModel, pack: Pack) -> int:
    """Bytes of the tensors that one forward saves; parameters and buffers are there anyway."""
    there = {_storage(tensor) for tensor in chain(model.parameters(), model.buffers())}
    saved: dict[int, tuple[int, Tensor]] = {}  # tensors are held, so that no storage is counted for another

    def note(tensor: Tensor) -> Tensor:
        if (storage := _storage(tensor)) not in there:
            saved[storage] = tensor.untyped_storage().nbytes(), tensor
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        output = model(pack.to(model.device))
        loss = torch.stack([term.sum for term in output.losses.values()]).sum()
    del output, loss
    return sum(size for size, _ in saved.values())


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata

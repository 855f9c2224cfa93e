"""Estimate the memory that a full pack keeps for its backward, from measurements of small packs.

The tensors that autograd saves grow linearly with the tokens of a pack, the predicted tokens, and the numbers that
encoders read, because fused attention saves no scores. So a few small packs are enough to estimate a full pack, whether
it has one long video or a hundred images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from omnitrain.data.loading.loader import first_samples
from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Sample
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.sources.rows import RowSource
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.step.plan import facts_of
from omnitrain.torch_private import storage_of

_COPIES = (1, 2)  # copies of each sample in a pack; two points give a slope


@dataclass(frozen=True)
class KeptMemory:
    """Bytes that a micro-batch keeps for its backward: of any pack, and for each unit (such as ``tokens``) of it."""

    constant: float
    per_unit: Mapping[str, float]

    def of(self, pack: Pack) -> float:
        """Return the bytes that ``pack`` keeps."""
        return self.constant + sum(count * self.per_unit[unit] for unit, count in _units(pack).items())

    def of_full_packs(self, samples: Sequence[Sample], pack_tokens: int) -> dict[str, float]:
        """Return source -> bytes that a pack full of samples like its sample keeps; the maximum if it has several."""
        largest: dict[str, float] = {}
        for sample in samples:
            grows = self.of(Pack.from_samples([sample])) - self.constant
            full = self.constant + grows * pack_tokens / len(sample)
            largest[sample.source] = max(full, largest.get(sample.source, 0.0))
        return largest


def kept_by_source(
    model: OmniModel, processor: OmniProcessor, sources: Sequence[RowSource], pack_tokens: int
) -> dict[str, float]:
    """Return source -> bytes that a pack full of its samples keeps, measured on the first row of each source.

    Samples longer than half of ``pack_tokens`` are skipped. For ``model`` see :func:`measure_kept_memory`.
    """
    firsts = [first for _, first in first_samples(sources, processor) if isinstance(first, Sample)]
    samples = [first for first in firsts if 2 * len(first) <= pack_tokens and not first.is_alone]
    return measure_kept_memory(model, samples).of_full_packs(samples, pack_tokens) if samples else {}


def measure_kept_memory(model: OmniModel, samples: Sequence[Sample]) -> KeptMemory:
    """Count the bytes that the forward of small packs saves, with a sample of each kind of media in ``samples``."""
    _kept(model, Pack.from_samples(samples[:1]))  # warm-up: tensors that a first forward caches do not count
    few, many = ([Pack.from_samples([sample] * copies) for sample in samples] for copies in _COPIES)
    units = [_units(pack) for pack in few]
    names = list(dict.fromkeys(chain.from_iterable(units)))
    counts = np.array([[of_pack.get(name, 0) for name in names] for of_pack in units]) / _COPIES[0]
    kept = np.array([[_kept(model, pack) for pack in packs] for packs in (few, many)], dtype=np.float64)
    slopes = (kept[1] - kept[0]) / (_COPIES[1] - _COPIES[0])
    scale = counts.max(axis=0)
    solved, *_ = np.linalg.lstsq(counts / scale, slopes, rcond=None)
    return KeptMemory(
        constant=float((kept[0] - _COPIES[0] * slopes).max()),
        per_unit=dict(zip(names, (solved / scale).tolist(), strict=True)),
    )


def _units(pack: Pack) -> dict[str, float]:
    """Return the counts that the memory of a pack grows with, as the step plan counts them."""
    facts = facts_of(pack)
    read = {f"numbers of {name}": float(sum(item.cost for item in items)) for name, items in facts.items.items()}
    return {"tokens": float(sum(facts.lengths)), **read}


def _kept(model: OmniModel, pack: Pack) -> int:
    """Return the bytes of the tensors that one forward saves, without parameters and buffers."""
    of_model = {storage_of(tensor) for tensor in chain(model.parameters(), model.buffers())}
    saved: dict[int, tuple[int, Tensor]] = {}  # holds the tensors, so that no storage address is reused

    def record(tensor: Tensor) -> Tensor:
        if (storage := storage_of(tensor)) not in of_model:
            saved[storage] = tensor.untyped_storage().nbytes(), tensor
        return tensor

    with saved_tensors_hooks(record, lambda tensor: tensor):
        output = model(pack.to(model.device))
        loss = torch.stack([term.sum for term in output.losses.values()]).sum()
    del output, loss
    return sum(size for size, _ in saved.values())

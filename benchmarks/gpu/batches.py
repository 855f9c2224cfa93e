"""The batches of the phases: packs of this repository's samples."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

from repo_samples import mixed_samples, text_samples
from transformers import DataCollatorWithFlattening

from gpu.measured import WARM_UP, Load
from gpu.sizes import Sizes
from omnitrain.data.packing.budget import PackBudget, fill_pack

HELD = 64  # samples from which packs are filled

Batch = list[dict[str, Any]]


def samples_of(kind: str, sizes: Sizes, config: Any, number: int) -> Batch:
    """Return HF-style samples, with the arguments that an HF processor adds for this model."""
    if kind != "mixed":
        return text_samples(number, sizes.longest)
    made = mixed_samples(number, sizes.longest, sizes.sides, config)
    return [
        sample | {"mm_token_type_ids": (sample["input_ids"] == config.image_token_id).astype(int)} for sample in made
    ]


def batches_of(kind: str, sizes: Sizes, config: Any, load: Load) -> list[Batch]:
    """Return the packs of all steps."""
    number = WARM_UP + load.rounds * load.steps
    samples: Batch = []
    while sum(len(sample["input_ids"]) for sample in samples[:-HELD]) < number * load.tokens:
        samples = samples_of(kind, sizes, config, 2 * len(samples) or 2 * HELD)
    return packed_batches(samples, load.tokens, number)


def packed_batches(samples: Batch, tokens: int, number: int) -> list[Batch]:
    """Return ``number`` batches packed by omnitrain's packer, from a buffer of ``HELD`` samples."""
    waiting, held = iter(samples), list[_Ordered]()
    batches: list[Batch] = []
    while len(batches) < number:
        held += [_Ordered(sample, index) for index, sample in islice(enumerate(waiting), HELD - len(held))]
        chosen = fill_pack(held, PackBudget(tokens))
        held = [sample for sample in held if sample not in chosen]
        batches.append([sample.arguments for sample in chosen])
    return batches


@dataclass(frozen=True, eq=False)
class _Ordered:
    """A sample in the packer's format."""

    arguments: dict[str, Any]
    index: int
    is_alone: bool = False

    def __len__(self) -> int:
        return len(self.arguments["input_ids"])


def flattened(batches: list[Batch]) -> dict[str, Any]:
    """Collate one batch by HF's collator, with the offsets of its samples."""
    (batch,) = batches
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    return collate([{name: sample[name].tolist() for name in ("input_ids", "labels")} for sample in batch])

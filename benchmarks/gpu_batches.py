"""The batches of the benchmarks on one GPU: packs of this repository's samples, and the same samples padded."""

from __future__ import annotations

import random
from argparse import Namespace
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from gpu_harness import WARM_UP
from gpu_sizes import Sizes
from repo_samples import mixed_samples, text_samples
from transformers import DataCollatorWithFlattening

from omnitrain.data.packing.budget import PackBudget
from omnitrain.data.packing.fill_pack import fill_pack
from omnitrain.data.packing.pack import IGNORED

HELD = 64  # samples from which packs are filled

Batch = list[dict[str, Any]]


def samples_of(kind: str, sizes: Sizes, config: Any, number: int) -> Batch:
    """Return HF-style samples, with the arguments that an HF processor adds for this model."""
    if kind == "text":
        return text_samples(number, sizes.longest)
    made = mixed_samples(number, sizes.longest, sizes.sides, config)
    return [
        sample | {"mm_token_type_ids": (sample["input_ids"] == config.image_token_id).astype(int)} for sample in made
    ]


def batches_of(kind: str, sizes: Sizes, config: Any, given: Namespace) -> list[Batch]:
    """Return the packs of all steps."""
    number = WARM_UP + given.rounds * given.steps
    samples: Batch = []
    while sum(len(sample["input_ids"]) for sample in samples[:-HELD]) < number * given.tokens:
        samples = samples_of(kind, sizes, config, 2 * len(samples) or 2 * HELD)
    return packed_batches(samples, given.tokens, number)


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


def padded_batches(batches: list[Batch], tokens: int) -> list[Batch]:
    """Return batches of the same samples, sorted by length, with at most ``tokens`` tokens after padding."""
    cut: list[Batch] = [[]]
    for sample in sorted((s for batch in batches for s in batch), key=lambda s: len(s["input_ids"])):
        if cut[-1] and len(sample["input_ids"]) * (len(cut[-1]) + 1) > tokens:
            cut.append([])
        cut[-1].append(sample)
    random.Random(0).shuffle(cut)
    return cut


def flattened(batches: list[Batch]) -> dict[str, Any]:
    """Collate one batch by HF's collator."""
    (batch,) = batches
    return DataCollatorWithFlattening()([{n: s[n].tolist() for n in ("input_ids", "labels")} for s in batch])


def padded(batches: list[Batch]) -> dict[str, torch.Tensor]:
    """Pad one batch to its longest sample; media are concatenated, as HF's processors return them."""
    (batch,) = batches
    ids, labels = ([torch.from_numpy(sample[name]) for sample in batch] for name in ("input_ids", "labels"))
    pad = torch.nn.utils.rnn.pad_sequence
    made = {
        "input_ids": pad(ids, batch_first=True),
        "labels": pad(labels, batch_first=True, padding_value=IGNORED),
        "attention_mask": pad([torch.ones_like(row) for row in ids], batch_first=True),
    }
    media = [sample for sample in batch if "pixel_values" in sample]
    for name in ("pixel_values", "image_grid_thw") if media else ():
        made[name] = torch.cat([torch.from_numpy(sample[name]) for sample in media])
    if "mm_token_type_ids" in batch[0]:
        types = [torch.from_numpy(sample["mm_token_type_ids"]) for sample in batch]
        made["mm_token_type_ids"] = pad(types, batch_first=True)
    return made

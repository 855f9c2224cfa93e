"""How full packs are, how many packs there are compared with the lower bound, and how fast the packer is.

Samples have lengths only, so nothing but packing takes time. ``uniform``: lengths 32 to 1,024. ``mixture``: a long tail
of texts, and samples with images, whose patches have a budget of their own.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from harness import Result, parser, report, start

from omnitrain.data.loading.order import Draw, SampleOrder, SourceShare
from omnitrain.data.loading.packer import SlotPacker
from omnitrain.data.loading.slots import SlotState
from omnitrain.data.packing.budget import PackBudget
from omnitrain.recipe import Data

FORMULA = (
    "fill = tokens / (packs x 8,192), without the last packs, for which no more samples come; least_fill = that of the "
    "emptiest pack; packs_over_bound = packs / bound, the larger one of tokens / 8,192 and patches / their budget; "
    "per_second = samples / seconds of the packer, in one thread (median of the rounds)"
)
TOKENS = 8192
ENCODER = "image_encoder"
MEDIA_NAMES = {ENCODER: (ENCODER,)}
PATCHES = 12_288  # of all images of a pack; the mixture has 88 % of so many for each pack of tokens
PATCHES_PER_TOKEN = 4


@dataclass(frozen=True)
class Size:
    """The size of a sample."""

    index: int
    length: int
    elements: Mapping[str, int] = field(default_factory=dict)
    is_alone: bool = False
    piece: int = 0
    num_pieces: int = 1

    @property
    def pieces(self) -> tuple[Size, ...]:
        """The sample, which is the only one of its row."""
        return (self,)

    def __len__(self) -> int:
        return self.length


class Stream:
    """Prepared samples of one slot."""

    def __init__(self, sizes: Sequence[Size]) -> None:
        self._sizes = iter(sizes)

    def take(self, slot: int) -> Size | None:
        """Return the next sample."""
        return next(self._sizes, None)

    def redirect(self, slot: int, draws: Iterator[Draw]) -> None:
        """Do nothing: there are no stages."""


def uniform(number: int) -> list[Size]:
    """Return samples of 32 to 1,024 tokens."""
    lengths = np.random.default_rng(0).integers(32, 1025, number).tolist()
    return [Size(index, length) for index, length in enumerate(lengths)]


def mixture(number: int) -> list[Size]:
    """Return texts whose lengths have a long tail, and among them 40 % samples with one to four images."""
    random = np.random.default_rng(1)
    texts = np.clip(random.lognormal(5.5, 1.2, number), 16, TOKENS).astype(int)
    images = np.where(random.random(number) < 0.4, random.integers(1, 5, number), 0)
    of_image = np.clip(random.lognormal(5.3, 0.7, number), 16, 640).astype(int)
    of_images = images * of_image
    texts = np.minimum(texts, TOKENS - of_images)
    elements = [{ENCODER: PATCHES_PER_TOKEN * tokens} if tokens else {} for tokens in of_images.tolist()]
    lengths = (texts + of_images).tolist()
    return [
        Size(index, length, of_media) for index, (length, of_media) in enumerate(zip(lengths, elements, strict=True))
    ]


def packed(sizes: Sequence[Size], budget: PackBudget) -> tuple[list[list[Size]], float]:
    """Return the packs of a slot that draws these samples once, and the samples per second of its packer."""
    data = Data.model_validate({"train": [{"path": "sizes"}], "pack_tokens": budget.tokens})
    order = SampleOrder([SourceShare("sizes", len(sizes), epochs=1)], seed=0)
    packer = SlotPacker(data, order, Stream(sizes), 0, SlotState(0), False, budget)
    packs, left = [], len(sizes)
    gc.collect()
    began = time.perf_counter()
    while left:
        packs.append(packer.choose())
        left -= len(packs[-1])
    return packs, len(sizes) / (time.perf_counter() - began)


def figures_of(packs: Sequence[Sequence[Size]], budget: PackBudget, buffer: int) -> dict[str, float]:
    """Return the figures of these packs."""
    sizes = np.array([np.sum(budget.sizes(pack), axis=1) for pack in packs])
    assert (sizes <= budget.limits).all()
    samples_after = np.cumsum([len(pack) for pack in packs][::-1])[::-1]
    full = sizes[samples_after > buffer, 0] / budget.tokens
    bound = max(-(-sizes.sum(axis=0) // np.array(budget.limits)))
    found = {"fill": float(full.mean()), "least_fill": float(full.min())}
    return found | {"packs": float(len(packs)), "bound": float(bound), "packs_over_bound": len(packs) / float(bound)}


def measure(number: int, rounds: int) -> Result:
    """Pack ``number`` samples of each kind in each round."""
    kinds = {
        "uniform": (uniform(number), PackBudget(TOKENS)),
        "mixture": (mixture(number), PackBudget(TOKENS, {ENCODER: PATCHES}, MEDIA_NAMES)),
    }
    buffer = Data.model_validate({"train": [{"path": "sizes"}]}).packing_buffer
    figures: dict[str, float] = {}
    speeds: dict[str, list[float]] = {}
    for name, (sizes, budget) in kinds.items():
        for _ in range(rounds):
            packs, speed = packed(sizes, budget)
            speeds.setdefault(f"{name}_per_second", []).append(speed)
        figures |= {f"{name}_{key}": value for key, value in figures_of(packs, budget, buffer).items()}
    figures |= {name: median(values) for name, values in speeds.items()}
    return Result("packing", FORMULA, figures, speeds)


if __name__ == "__main__":
    options = parser(__doc__ or "", rounds=7, steps=1)
    options.add_argument("--samples", type=int, default=50_000, help="samples of each kind")
    given = start(options)
    report(measure(given.samples, given.rounds), given.json)

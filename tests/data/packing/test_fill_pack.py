"""How packs are filled."""

import numpy as np

from omnitrain.data.loading.measure import Measure, pack_measures
from omnitrain.data.packing.budget import PackBudget, fill_pack
from omnitrain.recipe import Data

TOKENS, ELEMENTS = 8192, 12_288
NAMES = {"image_encoder": ("foundation.image", "foundation.video")}


def size(index: int, length: int, **elements: int) -> Measure:
    media = {f"foundation.{modality}": number for modality, number in elements.items()}
    return Measure("text", length, 0, {}, {}, elements=media, index=index)


def fill(sizes: list[Measure], budget: PackBudget) -> float:
    data = Data.model_validate({"train": [{"path": "sizes"}], "pack_tokens": budget.tokens})
    packing = pack_measures([sizes], data, budget, seed=1, packs=60, alone=False)
    return float(np.mean([pack.num_tokens for pack in packing.packs])) / budget.tokens


def test_packs_of_uniform_lengths_are_full() -> None:
    lengths = np.random.default_rng(0).integers(32, 1025, 2000).tolist()
    assert fill([size(index, length) for index, length in enumerate(lengths)], PackBudget(TOKENS)) > 0.998


def test_packs_of_a_long_tailed_mixture_are_full_within_the_budget_of_an_encoder() -> None:
    random = np.random.default_rng(1)
    texts = np.clip(random.lognormal(5.5, 1.2, 2000), 16, TOKENS - 640).astype(int).tolist()
    images = np.where(random.random(2000) < 0.4, np.clip(random.lognormal(6.2, 0.7, 2000), 16, 640), 0).astype(int)
    sizes = [
        size(i, text + image, image=4 * image)
        for i, (text, image) in enumerate(zip(texts, images.tolist(), strict=True))
    ]
    assert fill(sizes, PackBudget(TOKENS, {"image_encoder": ELEMENTS}, NAMES)) > 0.99


def test_the_oldest_sample_is_first_and_all_names_of_an_encoder_count_together() -> None:
    held = [size(0, 1, image=6), size(1, 5, video=5), size(2, 4, image=4), size(3, 2), size(4, 1, image=1)]
    budget = PackBudget(8, {"image_encoder": 10}, NAMES)
    assert [one.index for one in fill_pack(held, budget)] == [0, 2, 3]
    assert [one.index for one in fill_pack(held, PackBudget(8))] == [0, 1, 3]


def test_a_last_sample_fills_a_pack_alone() -> None:
    (last,) = fill_pack([size(7, 3, image=2)], PackBudget(8, {"image_encoder": 10}, NAMES))
    assert last.index == 7

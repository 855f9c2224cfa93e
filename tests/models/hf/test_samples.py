"""Samples in the form of transformers: every argument reaches the model, or the error names it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from omnitrain.data.packing.sample import Sample
from omnitrain.errors import UserError
from omnitrain.models.discovery import Discovery
from omnitrain.models.hf.samples import from_hf
from tests.models.two_media import samples_of


@lru_cache(maxsize=1)
def onevision() -> tuple[Discovery, dict[str, Any]]:
    _, native, (_, two) = samples_of("llava_onevision", "image", "equal sizes")
    return native, {name: value.numpy() for name, value in two.items()}


def converted(**changes: Any) -> Sample:
    native, arguments = onevision()
    return from_hf(native, arguments | changes, 3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vision_feature_layer", -2),
        ("vision_aspect_ratio", "anyres_max_4"),
        ("image_sizes_videos", np.array([[16, 16]])),
        ("pixels", np.ones((2, 2))),
        ("ragged", [np.ones((2, 2)), np.ones((3, 2))]),
    ],
)
def test_what_would_not_reach_the_model_is_named_whatever_its_type(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"sample 3: {name} would not reach the model; omnitrain passes \['batch_"):
        converted(**{name: value})


def test_what_says_nothing_is_taken() -> None:
    plain = converted()
    mask = np.ones_like(plain.input_ids)[None]
    same = converted(attention_mask=mask, vision_feature_layer=None, id="a row", num_tokens=np.array([3, 4]))
    assert np.array_equal(same.input_ids, plain.input_ids) and np.array_equal(same.position_ids, plain.position_ids)
    assert same.spans[0].item.features.keys() == {"pixel_values", "image_sizes", "batch_num_images"}
    assert converted(image_sizes_videos=np.ones((1, 2), dtype=bool)).spans[0].component == "foundation.image"


def test_padding_is_refused_and_position_ids_are_passed_on() -> None:
    length = converted().input_ids.size
    with pytest.raises(UserError, match="sample 3: attention_mask has zeros; remove the padding"):
        converted(attention_mask=np.arange(length)[None] > 0)
    moved = np.arange(length)[None] + 5
    assert converted(position_ids=moved).position_ids.tolist() == moved[0].tolist()
    with pytest.raises(UserError, match=rf"sample 3: .*position_ids has 2 tokens, but input_ids {length}"):
        converted(position_ids=np.ones((1, 2), dtype=int))

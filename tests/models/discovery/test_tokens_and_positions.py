from dataclasses import replace

import numpy as np
import pytest
from transformers import AutoConfig

from omnitrain.errors import UserError
from omnitrain.models.discovery import discover
from omnitrain.models.discovery.placeholders import TokenExtras
from omnitrain.models.hf.load import foundation_class
from omnitrain.models.hf.samples import from_hf
from tests.models.discovery.samples import built, media_sample


def test_token_types_tell_image_video_and_audio_from_text() -> None:
    extras = TokenExtras(("mm_token_type_ids",), {"image": 7, "video": 8, "audio": 9})
    assert extras(np.array([1, 7, 7, 8, 9, 2]))["mm_token_type_ids"].tolist() == [0, 1, 1, 2, 3, 0]


def test_rows_between_video_marks_are_video_where_images_have_the_same_placeholder() -> None:
    extras = TokenExtras(("mm_token_type_ids",), {"image": 7, "video": 7}, video_marks=(3, 4))
    assert extras(np.array([7, 3, 7, 1, 7, 4, 7]))["mm_token_type_ids"].tolist() == [1, 0, 2, 0, 2, 0, 1]


def test_a_prefix_model_gets_zeros_for_its_prompt_and_ones_from_the_first_trained_token() -> None:
    _, found = built("paligemma")
    assert found.extras.marks_answer and found.extras.names == ("token_type_ids",)
    answer = np.array([False, False, True, False])
    assert found.extras(np.arange(4), answer)["token_type_ids"].tolist() == [0, 0, 1, 1]


def test_types_of_a_causal_model_with_image_blocks_mark_images() -> None:
    _, found = built("gemma3")
    assert not found.extras.marks_answer and found.extras.names == ("token_type_ids",)


def test_a_text_only_sample_has_as_many_position_axes_as_one_with_images() -> None:
    _, found = built("qwen3_vl")
    ids = np.arange(3, 9)
    assert found.positions(ids, {}, found.extras(ids)).tolist() == [list(range(6))] * 3


def test_a_model_that_counts_from_one_is_followed() -> None:
    _, found = built("paligemma")
    assert found.positions(np.arange(4), {}, {}).tolist() == [1, 2, 3, 4]


def test_media_that_the_model_cannot_place_are_a_clear_error() -> None:
    sample = media_sample("qwen3_vl", "image")
    grid = sample.features["image_grid_thw"][:1]
    with pytest.raises(
        UserError, match="Qwen3VLForConditionalGeneration cannot compute positions for this sample's media"
    ):
        sample.found.positions(sample.ids, {"image_grid_thw": grid}, sample.found.extras(sample.ids))


@pytest.mark.parametrize("padding", [1, 4])
def test_a_model_that_counts_from_behind_its_padding_token_is_followed(padding: int) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = AutoConfig.for_model("roberta", vocab_size=20, max_position_embeddings=40, pad_token_id=padding, **sizes)
    found = discover(foundation_class(config)(config))
    assert found.positions(np.arange(4), {}, {}).tolist() == list(range(padding + 1, padding + 5))


def mixed(video: list[int]) -> dict[str, np.ndarray]:
    """Of glm4v, whose images and videos share token 190: an image, and a video of rows ``video``."""
    _, found = built("glm4v")
    image, frames = (found.interfaces[modality].probe.make([0]) for modality in ("image", "video"))
    ids = np.array([5, 192, 190, 190, 190, 190, 193, *video, 6])
    return {"input_ids": ids, "labels": ids, **{k: v.numpy() for k, v in (image | frames).items()}}


def test_images_and_videos_of_one_token_are_told_apart_by_their_marks() -> None:
    _, found = built("glm4v")
    spans = {s.component: s.positions.tolist() for s in from_hf(found, mixed([194, 190, 190, 190, 190, 195])).spans}
    assert spans == {"foundation.image": [2, 3, 4, 5], "foundation.video": [8, 9, 10, 11]}
    with pytest.raises(UserError, match=r"video.* are given, but input_ids has no placeholder 190"):
        from_hf(found, mixed([]))
    with pytest.raises(UserError, match=r"sample 0: .*image and video have the same placeholder token 190"):
        from_hf(replace(found, extras=replace(found.extras, video_marks=None)), mixed([]))

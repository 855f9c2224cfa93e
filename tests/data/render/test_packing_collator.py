"""Dicts of a HF processor's outputs become the pack that omnitrain's processor makes of the same conversations."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Sample
from omnitrain.data.render.native import NativeInputs
from omnitrain.data.render.packing_collator import OmniDataCollatorWithPacking
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.render.template_renderer import TemplateRenderer
from omnitrain.data.sources.rows import Row
from omnitrain.errors import UserError
from tests.tiny import part, png
from tests.tiny_processors import FAMILIES

ARGUMENTS = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}


def native_of(family: str = "qwen2_vl", **changes: Any) -> NativeInputs:
    names = ARGUMENTS if family == "qwen2_vl" else {"image": ("pixel_values",)}
    return dataclasses.replace(FAMILIES[family]()[1], media_arguments=names, **changes)


def conversation(text: str, *images: bytes) -> Row:
    asked = [*(part("image") for _ in images), part("text", text)]
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": [part("text", "b" + text)]}]
    return Row("r", "s", messages, {"image": list(images)}, {})


ROWS = [conversation("two", png(0, 9), png(1, 14)), conversation("none"), conversation("one", png(2))]


def samples_of(family: str) -> list[Sample]:
    made, native = FAMILIES[family]()
    processor = OmniProcessor(TemplateRenderer(made, native), {}, {})
    return [processor.sample(row, index) for index, row in enumerate(ROWS)]


def features_of(family: str, padding: int = 0) -> list[dict[str, Any]]:
    """What the plain processor returns, with labels of what omnitrain trains; ``padding`` tokens at the left."""
    made, _ = FAMILIES[family]()
    features = []
    for row, sample in zip(ROWS, samples_of(family), strict=True):
        images = [Image.open(io.BytesIO(data)) for data in row.media["image"]]
        text = made.apply_chat_template(row.messages, tokenize=False)
        options = {"add_special_tokens": not text.startswith(made.tokenizer.bos_token or "\0")}
        whole = dict(made(text=[text], images=images or None, return_tensors="pt", **options))
        whole["labels"] = whole["input_ids"].where(torch.from_numpy(sample.loss_mask), -100)
        per_token = [name for name, value in whole.items() if value.shape == whole["input_ids"].shape]
        whole |= {name: torch.nn.functional.pad(whole[name], (padding, 0)) for name in per_token}
        features.append(whole)
    return features


def arrays_of(pack: Pack) -> dict[str, torch.Tensor]:
    media = {name: batch.groups[0].features for name, batch in pack.inputs.items()}
    positions = {f"positions of {name}": batch.positions for name, batch in pack.inputs.items()}
    fields = ("input_ids", "position_ids", "cu_seqlens", "text_rows", "text_labels")
    found = {name: getattr(pack, name) for name in fields} | pack.token_inputs | positions
    return found | {f"{name}: {key}": array for name, of_name in media.items() for key, array in of_name.items()}


@pytest.mark.parametrize("family", ["qwen2_vl", "llava", "gemma3"])
@pytest.mark.parametrize("padding", [0, 3])
def test_features_of_the_hf_processor_are_the_pack_of_the_same_rows(family: str, padding: int) -> None:
    expected = arrays_of(Pack.from_samples(samples_of(family)))
    found = arrays_of(OmniDataCollatorWithPacking(native_of(family))(features_of(family, padding)))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == found[name].dtype and torch.equal(tensor, found[name]), name


def test_positions_are_the_models_or_given_ones() -> None:
    def axes(ids: np.ndarray, token_inputs: Any, features: Any, *, audio_in_video: bool) -> np.ndarray:
        return np.stack([np.arange(len(ids)) + len(features.get("image", ())) * axis for axis in range(3)])

    collate = OmniDataCollatorWithPacking(native_of(positions=axes))
    features = features_of("qwen2_vl")
    assert collate(features).position_ids[:, 0, -1].tolist() == [
        len(samples_of("qwen2_vl")[0]) - 1 + a for a in range(3)
    ]
    given = [one | {"position_ids": torch.full((3, *one["input_ids"].shape), 7)} for one in features]
    assert collate(given).position_ids.unique().tolist() == [7]


def test_without_labels_all_text_is_predicted() -> None:
    features = [{name: value for name, value in one.items() if name != "labels"} for one in features_of("qwen2_vl")]
    pack = OmniDataCollatorWithPacking(native_of())(features)
    media = sum(sum(batch.num_tokens) for batch in pack.inputs.values())
    assert len(pack.text_labels) == pack.num_tokens - 3 - media and not (pack.text_labels == 2).any()


def test_lists_of_text_and_samples_are_packed() -> None:
    rows = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "id": "a", "source": "books"}, {"input_ids": [8, 9]}]
    pack = OmniDataCollatorWithPacking()(rows, indices=[40, 41])
    assert pack.input_ids.tolist() == [[8, 9, 5, 6, 7]] and pack.cu_seqlens.tolist() == [0, 2, 5]
    assert pack.position_ids.tolist() == [[0, 1, 0, 1, 2]] and pack.text_labels.tolist() == [9, 6, 7]
    assert (pack.info.ids, pack.info.sources, pack.info.indices) == (("41", "a"), ("data", "books"), (41, 40))
    samples = samples_of("llava")
    assert OmniDataCollatorWithPacking()(samples).info == Pack.from_samples(samples).info


def test_the_features_that_are_named_are_the_only_ones() -> None:
    collate = OmniDataCollatorWithPacking(
        native_of(), packing_features=["input_ids", "labels", "mm_token_type_ids"], concat_features=["pixel_values"]
    )
    with pytest.raises(ValueError, match=r"features of row '0': \['attention_mask', 'image_grid_thw'\] are neither in"):
        collate(features_of("qwen2_vl"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"input_ids": None}, "input_ids are missing; found"),
        ({"pixel_value": 1}, r"\['pixel_value'\] are neither in packing_features nor .*did you mean `pixel_values`\?"),
        ({"pixel_values": None, "image_grid_thw": None}, r"has \d+ placeholders 2 of image, but no \['image_grid_thw'"),
        ({"pixel_values_videos": np.zeros((4, 8))}, r"\['pixel_values_videos'\] are given, but .* no placeholder 3"),
        ({"mm_token_type_ids": None}, r"\['mm_token_type_ids'\] are missing, which the model takes for each token"),
        ({"labels": torch.tensor([[1, 2]])}, "labels has 2 tokens, but input_ids"),
        ({"labels": torch.full((2, 40), -100)}, r"labels: found the shape \[2, 40\]; expected \[T\]"),
        ({"input_ids": torch.rand(1, 40)}, "input_ids: found 40 values of float32; expected integers"),
        ({"attention_mask": 0}, "attention_mask: all tokens are padding"),
    ],
)
def test_features_that_do_not_fit_are_an_error_in_words(changes: dict[str, Any], reason: str) -> None:
    features = features_of("qwen2_vl")[0]
    if changes == {"attention_mask": 0}:
        changes = {"attention_mask": features["attention_mask"] * 0}
    with pytest.raises(ValueError, match=f"features of row '0': .*{reason}"):
        OmniDataCollatorWithPacking(native_of())([features | changes])


def test_a_row_without_names_is_refused() -> None:
    with pytest.raises(ValueError, match="row 1 is a str; expected a Sample or a dict of features such as input_ids"):
        OmniDataCollatorWithPacking()([{"input_ids": [1, 2]}, "text"])


def test_media_of_bfloat16_are_packed_as_float32() -> None:
    features = features_of("qwen2_vl")
    halves = [
        {name: value.bfloat16() if name == "pixel_values" else value for name, value in one.items()} for one in features
    ]
    found, expected = (OmniDataCollatorWithPacking(native_of())(rows) for rows in (halves, features))
    (of_halves,), (whole,) = (pack.inputs["foundation.image"].groups for pack in (found, expected))
    assert torch.equal(of_halves.features["pixel_values"], whole.features["pixel_values"].bfloat16().float())


def test_shifted_labels_are_refused() -> None:
    with pytest.raises(ValueError, match=r"labels: found 6 at token 0, but input_ids has 5; .*must not be shifted"):
        OmniDataCollatorWithPacking()([{"input_ids": [5, 6, 7], "labels": [6, 7, -100]}])


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"concat_features": ["pixel_value"]}, "the model does not take 'pixel_value'; did you mean `pixel_values`"),
        (
            {"packing_features": ["input_ids", "lables"]},
            "packing_features: the model does not take 'lables'; did you mean",
        ),
        ({"packing_features": ["labels"]}, r"found \['labels'\]; `input_ids` must be one of them"),
    ],
)
def test_features_that_the_model_does_not_take_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        OmniDataCollatorWithPacking(native_of(), **options)
    if "concat_features" in options:
        with pytest.raises(
            UserError, match=r"nothing is valid here; for a model with media, pass its `model\.native_in"
        ):
            OmniDataCollatorWithPacking(**options)


def test_media_that_share_a_placeholder_cannot_be_told_apart() -> None:
    native = NativeInputs({"image": 3, "video": 3}, media_arguments={"image": ("pixels",), "video": ("frames",)})
    row = {"input_ids": [5, 3, 3], "pixels": np.zeros((1, 2)), "frames": np.zeros((1, 2))}
    with pytest.raises(ValueError, match="image and video have the same placeholder token 3"):
        OmniDataCollatorWithPacking(native)([row])
    pack = OmniDataCollatorWithPacking(native)([row | {"frames": None}])
    assert pack.inputs["foundation.image"].positions.tolist() == [1, 2]

"""A conversation for the foundation's own forward: ids, trained tokens, and the inputs of the processor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from omnitrain.data.packing.budget import PackBudget, fill_pack, pack_all
from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Rejected, Sample
from omnitrain.data.render.media_texts import written_between
from omnitrain.data.render.native import NativeInputs
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.render.template_renderer import TemplateRenderer
from omnitrain.data.sources.rows import Row
from omnitrain.errors import UserError
from tests.data.render.test_template_renderer import MIXED, row, trained
from tests.tiny import wav
from tests.tiny_processors import FAMILIES

TAKEN = frozenset({"attention_mask", "input_features", "feature_attention_mask", "pixel_values", "token_type_ids"})


def processor_of(family: str, modality: str, **changes: Any) -> OmniProcessor:
    """Of a foundation whose own forward alone reads ``modality``."""
    native = NativeInputs({}, **({"in_forward": frozenset({modality}), "forward_arguments": TAKEN} | changes))
    return OmniProcessor(TemplateRenderer(FAMILIES[family]()[0], native), {}, {})


@pytest.mark.parametrize(("family", "modality"), [("qwen2_audio", "audio"), ("llava", "image"), ("gemma3", "image")])
def test_ids_and_trained_tokens_are_those_of_a_foundation_with_towers_apart(family: str, modality: str) -> None:
    made, native = FAMILIES[family]()
    conversation = row(*MIXED[family])
    whole = processor_of(family, modality)
    apart = OmniProcessor(TemplateRenderer(made, native), {}, {})
    ours, expected = whole.sample(conversation), apart.sample(conversation)
    np.testing.assert_array_equal(ours.input_ids, expected.input_ids)
    np.testing.assert_array_equal(ours.loss_mask, expected.loss_mask)
    assert trained(whole, ours) == trained(apart, expected) and ours.loss_mask.any()
    features = [span.item.features for span in expected.spans]
    for name in features[0].keys() & TAKEN:
        np.testing.assert_array_equal(ours.forward_inputs[name], np.concatenate([each[name] for each in features]))
    assert ours.forward_inputs["attention_mask"].shape == (1, len(ours))
    assert not ours.spans and ours.is_alone and not whole.sample(row("hi", "A")).is_alone


def test_the_sample_is_given_whole_and_alone() -> None:
    processor = processor_of("qwen2_audio", "audio")
    heard, text = processor.sample(row("a+what", "A", "more"), without_tail=True), processor.sample(row("hi", "B"), 1)
    assert isinstance(heard, Sample) and len(heard) == len(heard.input_ids)
    assert len(text.without_tail()) < len(text)
    assert fill_pack([heard, text], PackBudget(999)) == [heard]
    assert fill_pack([text, heard, text], PackBudget(999)) == [text, text]
    assert [pack.info.ids for pack in pack_all([text, heard, text, text], 999)] == [("r",), ("r",), ("r", "r")]
    with pytest.raises(ValueError, match="must be alone"):
        Pack.from_samples([text, heard])
    inputs = Pack.from_samples([heard]).forward_inputs
    assert {name: tuple(tensor.shape) for name, tensor in inputs.items() if name != "attention_mask"} == {
        "input_features": (1, 8, 200),
        "feature_attention_mask": (1, 200),
    }


def test_every_clip_must_be_heard_to_its_end() -> None:
    processor = processor_of("qwen2_audio", "audio")  # two seconds at most
    conversation = row("a+a+what", "A")
    conversation.media["audio"][1] = wav(0, 3.0)
    rejected = processor.sample(conversation)
    assert isinstance(rejected, Rejected) and "s of an audio of 3.0 s" in rejected.reason


def test_a_medium_without_tokens_costs_its_row() -> None:
    conversation = row("a+what", "A")
    conversation.media["audio"][0] = wav(0, 0.005)
    rejected = processor_of("qwen2_audio", "audio").sample(conversation)
    assert isinstance(rejected, Rejected)


def test_types_of_prompt_and_answer_are_those_of_the_trained_tokens() -> None:
    def types(ids: np.ndarray, answer: np.ndarray) -> dict[str, np.ndarray]:
        return {"token_type_ids": answer.astype(np.int64)}

    taken = TAKEN - {"token_type_ids"}
    made = processor_of("gemma3", "image", token_types=types, forward_arguments=taken).sample(row("i+what", "A"))
    np.testing.assert_array_equal(made.token_inputs["token_type_ids"], made.loss_mask)
    assert "token_type_ids" not in made.forward_inputs


def test_features_that_the_forward_does_not_take_are_refused() -> None:
    processor = processor_of("qwen2_audio", "audio", forward_arguments=frozenset({"attention_mask"}))
    with pytest.raises(UserError, match=r"returns input_features for media, but .* takes attention_mask"):
        processor.sample(row("a+what", "A"))


def test_a_row_is_read_in_one_way() -> None:
    changes = {"in_forward": frozenset({"audio"}), "forward_arguments": TAKEN}
    native = replace(FAMILIES["qwen2_5_omni"]()[1], placeholders={"image": 2}, **changes)
    processor = OmniProcessor(TemplateRenderer(FAMILIES["qwen2_5_omni"]()[0], native), {}, {})
    with pytest.raises(UserError, match="shows both image and audio"):
        processor.sample(row("i+a+what", "A"))


def test_what_the_processor_does_not_show_is_refused_and_text_is_read() -> None:
    processor = processor_of("llava", "audio")
    assert isinstance(processor.sample(row("hi", "A")), Sample)
    asked: Row = row("a+what", "A")
    with pytest.raises(UserError, match="the foundation cannot read it: LlavaProcessor has no token for it"):
        processor.sample(asked)


def test_texts_between_media_are_found_from_both_ends() -> None:
    assert written_between(["a", "b", "c"], "a11b22c") == ["11", "22"]
    assert written_between(["a", "\n", "c"], "a1\n1\n2\n2c") == ["1", "1\n2\n2"]
    for pieces, whole in ((["a", "b"], "xb"), (["a", "b"], "a1"), (["a", "b", "b"], "a1b"), (["ab", "bc"], "abc")):
        with pytest.raises(ValueError):
            written_between(pieces, whole)

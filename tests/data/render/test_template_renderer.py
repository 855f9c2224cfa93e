import dataclasses
import functools
import io
import json
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from omnitrain.data.chat.text_tokenizer import load_hf_processor
from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Rejected, Sample
from omnitrain.data.render import expansion
from omnitrain.data.render.native import NativeInputs
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.render.template_renderer import TemplateRenderer
from omnitrain.data.sources.media import MediaFile, Waveform, decode_audio, decode_clip
from omnitrain.data.sources.rows import Row, open_sources
from omnitrain.errors import UserError
from omnitrain.recipe import ChatFormat, Data, DataSource
from tests.tiny import part, png, tiny_model, wav, webp
from tests.tiny_processors import FAMILIES, ROWS, byte_tokenizer, chatml

MIXED = {
    "qwen2_vl": ("v+look\n\n+i+ here\n", "\nA\n", "i+v+and", "b c"),
    "qwen3_vl": ("v+look\n\n+i+ here\n", "\nA\n", "i+v+and", "b c"),
    "glm4v": ("v+look\n\n+i+ here\n", "\nA\n", "i+v+and", "b c"),
    "qwen2_5_omni": ("v+a+look\n\n+i+ here\n", "\nA\n", "i+v+a+and", "b c"),
    "qwen3_omni": ("v+a+look\n\n+i+ here\n", "\nA\n", "i+v+a+and", "b c"),
    "qwen2_audio": ("a+a+look\n\n", "\nA\n", "a+and", "b c"),
    "llava": ("i+look\n\n+i+ here\n", "\nA\n", "i+and", "b c"),
    "gemma3": ("i+look\n\n+i+ here\n", "\nA\n", "i+and", "b c"),
    "internvl": ("v+look\n\n+i+ here\n", "\nA\n", "i+and", "b c"),
}


@functools.cache
def medium(kind: str, number: int) -> bytes:
    if kind == "image":
        return png(number, 9 + 5 * (number % 4))
    return wav(number, 0.4 + 0.3 * (number % 4)) if kind == "audio" else webp(number, 3 + number % 4)


def row(*turns: str) -> Row:
    """Users and assistants in turn; ``i``, ``a`` and ``v`` alone stand for media of users, the rest is text."""
    kinds = {"i": "image", "a": "audio", "v": "video"}
    messages = []
    for number, turn in enumerate(turns):
        is_user = number % 2 == 0
        parts = [part(kinds[t]) if is_user and t in kinds else part("text", t) for t in turn.split("+")]
        messages.append({"role": "user" if is_user else "assistant", "content": parts})
    counts = {kind: sum(p["type"] == kind for m in messages for p in m["content"]) for kind in kinds.values()}
    media = {kind: [medium(kind, i) for i in range(count)] for kind, count in counts.items()}
    return Row("r", "s", messages, media, {})


def processor_of(family: str, **options: Any) -> OmniProcessor:
    made, native = FAMILIES[family]()
    return OmniProcessor(TemplateRenderer(made, native, **options), {}, {})


def sample_of(processor: OmniProcessor, *turns: str) -> Sample:
    made = processor.sample(row(*turns))
    assert isinstance(made, Sample), made
    return made


def plain(family: str, conversation: Row) -> dict[str, np.ndarray]:
    """What transformers makes of the whole conversation in one call."""
    media = {
        "image": [Image.open(io.BytesIO(data)) for data in conversation.media["image"]],
        "audio": [decode_audio(MediaFile.of(data)).resampled(16_000).samples for data in conversation.media["audio"]],
        "video": [decode_clip(MediaFile.of(data), 99) for data in conversation.media["video"]],
    }
    waiting = {"image": iter(media["image"]), "audio": iter(media["audio"])}
    waiting["video"] = iter([np.stack([np.asarray(f) for f in clip.frames]) for clip in media["video"]])

    def shown(p: dict[str, Any]) -> dict[str, Any]:
        kind = p["type"]
        return {"type": "text", "text": p["text"]} if kind == "text" else {"type": kind, kind: next(waiting[kind])}

    messages = [{"role": m["role"], "content": [shown(p) for p in m["content"]]} for m in conversation.messages]
    details = [expansion.video_metadata(clip) for clip in media["video"]]
    options: dict[str, Any] = {"return_tensors": "pt"} | ({"video_metadata": [details]} if details else {})
    if details:  # a rate that processors may read, as users of Qwen's utilities give it
        options["videos_kwargs"] = {"fps": details[0]["fps"]}
    processor = FAMILIES[family]()[0]
    made = processor.apply_chat_template(messages, tokenize=True, return_dict=True, processor_kwargs=options)
    return {name: np.asarray(value) for name, value in made.items()}


def trained(processor: OmniProcessor, sample: Sample) -> str:
    """Trained tokens as text, a bar where others lie between."""
    runs = np.split(np.arange(len(sample)), np.flatnonzero(np.diff(sample.loss_mask)) + 1)
    kept = [run for run in runs if sample.loss_mask[run[0]]]
    return "|".join(processor.tokenizer.decode(sample.input_ids[run]) for run in kept)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_ids_and_features_are_those_of_the_plain_hf_processor(family: str) -> None:
    conversation = row(*MIXED[family])
    sample = processor_of(family).sample(conversation)
    reference = plain(family, conversation)
    np.testing.assert_array_equal(sample.input_ids, reference.pop("input_ids")[0])
    for name, values in sample.token_inputs.items():
        np.testing.assert_array_equal(values, reference.pop(name)[0])
    features: dict[str, list[np.ndarray]] = {}
    for span in sample.spans:
        for name, values in span.item.features.items():
            features.setdefault(name, []).append(values)
    assert set(features) == set(reference) - {"attention_mask", "token_type_ids", "mm_token_type_ids"}
    for name, items in features.items():
        if {values.shape[1:] for values in items} != {reference[name].shape[1:]}:
            continue  # transformers pads clips of one conversation to one length, items are never padded
        np.testing.assert_array_equal(np.concatenate(items), reference[name])


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_rows_of_media_lie_where_the_placeholders_are(family: str) -> None:
    made, native = FAMILIES[family]()
    processor = OmniProcessor(TemplateRenderer(made, native), {}, {})
    sample = sample_of(processor, *MIXED[family])
    is_placeholder = np.isin(sample.input_ids, list(native.placeholders.values()))
    filled = np.concatenate([span.positions for span in sample.spans])
    assert sorted(filled) == np.flatnonzero(is_placeholder).tolist()
    modality = {"i": "foundation.image", "a": "foundation.audio", "v": "foundation.video"}
    expected = [modality[t] for turn in MIXED[family][::2] for t in turn.split("+") if t in modality]
    assert [span.component for span in sample.spans] == expected


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("qwen2_vl", "A\n<|im_end|>|b c<|im_end|>"),
        ("glm4v", "A\n<|user|>|b c"),  # its turns have no end of their own
        ("llava", " \nA\n</s>| b c</s>"),  # the blank is what generation starts with
        ("gemma3", "A<end_of_turn>|b c<end_of_turn>"),  # the template trims
        ("qwen2_audio", "A\n<|im_end|>|b c<|im_end|>"),
    ],
)
def test_only_what_the_assistant_writes_is_trained(family: str, expected: str) -> None:
    processor = processor_of(family)
    assert trained(processor, sample_of(processor, *MIXED[family])) == expected


def test_a_template_that_rewrites_answers_is_trained_from_generation_prompt_to_end() -> None:
    made, native = FAMILIES["qwen2_vl"]()
    made.chat_template = made.chat_template.replace("{{ c.text }}", "{{ c.text[1:-1] or c.text }}")
    processor = OmniProcessor(TemplateRenderer(made, native), {}, {})
    assert trained(processor, sample_of(processor, "pq", "xrs", "tu", "xyz")) == "r<|im_end|>|y<|im_end|>"


def test_an_answer_that_spells_the_end_is_trained_whole() -> None:
    processor = processor_of("qwen2_vl")
    assert (
        trained(processor, sample_of(processor, "q", "b<|im_end|>c", "q", "d")) == "b<|im_end|>c<|im_end|>|d<|im_end|>"
    )


def test_what_the_template_writes_before_an_answer_is_trained_where_generation_would_write_it() -> None:
    made, native = FAMILIES["qwen2_vl"]()
    opening = "<|im_start|>{{ m.role }}\n"
    made.chat_template = made.chat_template.replace(
        opening, opening + "{% if m.role == 'assistant' %}<think></think>{% endif %}"
    )
    processor = OmniProcessor(TemplateRenderer(made, native), {}, {})
    assert trained(processor, sample_of(processor, "q", "b")) == "<think></think>b<|im_end|>"


def test_an_answer_without_a_question_is_trained_without_the_default_system_text(tmp_path: Path) -> None:
    """As in Qwen2-VL's template, which writes a system message if the conversation has none."""
    default = "{% if loop.first and m.role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    tokenizer = byte_tokenizer(["<|im_start|>", "<|im_end|>"], eos_token="<|im_end|>")
    tokenizer.chat_template = chatml().replace("%}<|im_start|>{{ m.role", "%}" + default + "<|im_start|>{{ m.role", 1)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"caption": "a cat"}) + "\n")
    node = {"path": str(tmp_path / "rows.jsonl"), "columns": {"response": "caption"}}
    (rows,) = open_sources([DataSource.model_validate(node)])
    sample = OmniProcessor(TemplateRenderer(tokenizer), {}, {}).sample(rows[0])
    assert tokenizer.decode(sample.input_ids[sample.loss_mask]) == "a cat<|im_end|>"
    assert tokenizer.decode(sample.input_ids).startswith("<|im_start|>system\nYou help.<|im_end|>\n")


def test_a_prompt_and_its_answer_are_the_sample() -> None:
    processor = processor_of("qwen2_vl")
    conversation = row("i+look", "a", "more", "b")
    sample, prompt = processor.sample(conversation), processor.prompt(conversation)
    assert processor.tokenizer.decode(sample.input_ids[len(prompt) :]) == "b<|im_end|>\n"
    np.testing.assert_array_equal(sample.input_ids[: len(prompt)], prompt.input_ids)
    assert not prompt.loss_mask.any() and processor.end_token == processor.tokenizer.eos_token_id


def test_rows_of_a_video_lie_apart_where_times_are_written_between_its_frames() -> None:
    processor = processor_of("qwen3_vl")
    (span,) = sample_of(processor, "v", "a").spans
    assert span.scattered is not None and span.item.num_tokens == 8
    assert np.diff(span.positions).tolist() == [1, 1, 1, len("<0.1 seconds>") + 3, 1, 1, 1]
    assert sample_of(processor, "i", "a").spans[0].scattered is None


@pytest.mark.parametrize("family", ["qwen2_5_omni", "qwen3_omni"])
def test_a_video_is_read_with_its_sound_where_asked(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = Waveform(np.sin(np.arange(16_000, dtype=np.float32)), 16_000)
    monkeypatch.setattr(expansion, "decode_soundtrack", lambda data: sound)
    processor = processor_of(family, audio_in_video=True)
    sample = sample_of(processor, "v+a+what", "b", "v", "c")
    assert [s.component.partition(".")[2] for s in sample.spans] == ["video", "audio", "audio", "video", "audio"]
    first, heard = sample.spans[0], sample.spans[1]
    assert heard.item.num_tokens == 25 or heard.item.num_tokens == 13
    assert first.positions[0] < heard.positions[-1] and heard.positions[0] < sample.spans[2].positions[0]
    assert set(first.item.features) == {"pixel_values_videos", "video_grid_thw", "video_second_per_grid"}
    assert set(heard.item.features) == {"input_features", "feature_attention_mask"}


def test_sound_in_videos_is_refused_where_the_processor_has_none_of_it() -> None:
    with pytest.raises(UserError, match="audio_in_video: Qwen2VLProcessor cannot read videos with their sound"):
        processor_of("qwen2_vl", audio_in_video=True)


def test_a_clip_that_would_be_cut_rejects_its_row() -> None:
    processor = processor_of("qwen2_audio")
    conversation = row("a", "b")
    conversation.media["audio"][0] = wav(0, 2.5)
    rejected = processor.sample(conversation)
    assert isinstance(rejected, Rejected)
    assert "WhisperFeatureExtractor keeps only 2.0 s of an audio of 2.5 s" in rejected.reason
    conversation.media["audio"][0] = wav(0, 2.0)
    assert isinstance(processor.sample(conversation), Sample)


def test_text_that_spells_a_placeholder_rejects_its_row() -> None:
    rejected = processor_of("qwen2_vl").sample(row("i+what is <|image_pad|>", "b"))
    assert isinstance(rejected, Rejected) and "'<|image_pad|>' 2 times, but the messages show 1" in rejected.reason
    rejected = processor_of("gemma3").sample(row("i+what is <image_soft_token>", "b"))
    assert isinstance(rejected, Rejected) and "contains 1 placeholder tokens" in rejected.reason


def test_a_damaged_file_rejects_its_row() -> None:
    conversation = row("i", "b")
    conversation.media["image"][0] = b"no image"
    rejected = processor_of("llava").sample(conversation)
    assert isinstance(rejected, Rejected) and "unreadable image of 8 bytes" in rejected.reason


def test_a_clip_shorter_than_a_window_rejects_its_row() -> None:
    conversation = row("a", "b")
    conversation.media["audio"][0] = wav(0, seconds=0.0025)
    rejected = processor_of("qwen3_omni").sample(conversation)
    assert isinstance(rejected, Rejected)
    assert rejected.reason.startswith("audio 1: Qwen3OmniMoeProcessor cannot prepare this audio: RuntimeError: ")
    rejected = processor_of("qwen2_5_omni").sample(conversation)
    assert isinstance(rejected, Rejected)
    assert rejected.reason.startswith("audio 1: Qwen2_5OmniProcessor makes no tokens for this audio: it is too short")


def test_messages_that_the_template_refuses_reject_their_row() -> None:
    made, native = FAMILIES["llava"]()
    made.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + (
        made.chat_template
    )
    processor = OmniProcessor(TemplateRenderer(made, native), {}, {})
    conversation = row("q b", "c")
    conversation.messages.insert(0, {"role": "system", "content": "s"})
    rejected = processor.sample(conversation)
    assert isinstance(rejected, Rejected) and "refuses these messages: no system" in rejected.reason


def test_a_modality_that_the_foundation_lacks_names_the_row() -> None:
    with pytest.raises(UserError, match=r"row 'r' of 's' asks the model to read audio, but it can read \['image'\]"):
        processor_of("llava").sample(row("a", "b"))


def test_a_processor_of_another_model_is_refused() -> None:
    made, native = FAMILIES["llava"]()
    other = dataclasses.replace(native, placeholders={"image": 5000})
    with pytest.raises(UserError, match=r"row 'r': the processor's text has no placeholder token 5000 for this image"):
        OmniProcessor(TemplateRenderer(made, other), {}, {}).sample(row("i", "b"))


def test_an_output_that_the_foundation_takes_and_would_not_get_is_refused() -> None:
    made, native = FAMILIES["qwen2_vl"]()
    taken = {
        "forward_arguments": frozenset({"pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"})
    }
    passed = {"image": ("pixel_values",), "video": ("pixel_values_videos", "video_grid_thw")}
    native = dataclasses.replace(native, media_arguments=passed, **taken)
    processor = OmniProcessor(TemplateRenderer(made, native), {}, {})
    with pytest.raises(
        UserError, match=r"Qwen2VLProcessor returns image_grid_thw for image; .* passes only pixel_values"
    ):
        processor.sample(row("i+what", "A"))
    assert processor.sample(row("v+what", "A")).spans


@pytest.mark.parametrize("family", ROWS)
def test_a_medium_has_a_place_for_each_row_that_its_model_makes(family: str) -> None:
    processor = processor_of(family)
    shown = [modality[0] for modality in processor.renderer.native.placeholders]
    spans = sample_of(processor, "+".join([*shown, "x", "i"]), "b").spans
    assert len(spans) == len(shown) + 1
    for span in spans:
        modality = span.component.removeprefix("foundation.")
        assert len(span.positions) == ROWS[family](modality, span.item.features) > 0


def test_a_processor_whose_media_depend_on_each_other_is_refused() -> None:
    made, native = FAMILIES["qwen2_vl"]()
    expand = type(made).replace_image_token
    type(made).replace_image_token = lambda self, inputs, image_idx, **_: expand(self, inputs, 0)
    processor = OmniProcessor(TemplateRenderer(made, native), {}, {})
    sample_of(processor, "i", "b")
    with pytest.raises(UserError, match="gives different input_ids for single media than for the whole"):
        processor.sample(row("i+i", "b"))


def test_attached_components_are_written_beside_a_native_foundation() -> None:
    model = tiny_model()
    _, writers = model.media_adapters()
    made, native = FAMILIES["qwen2_vl"]()
    made.tokenizer.add_tokens(["<|image|>", "<|audio|>"], special_tokens=True)
    processor = OmniProcessor(TemplateRenderer(made, native), {}, writers)
    conversation = row("i+draw", "there: ")
    conversation.messages[1]["content"].append(part("image"))
    conversation.media["image"].append(png(7))
    sample = processor.sample(conversation)
    read, written = sample.spans
    assert (read.component, written.component) == ("foundation.image", "image_decoder")
    assert written.is_target and written.item.num_tokens == 16
    start = processor.start_tokens["image"]
    assert sample.input_ids[written.start - 1] == start and sample.loss_mask[written.start - 1]
    assert (sample.input_ids[written.positions] == start).all() and not sample.loss_mask[written.positions].any()
    assert trained(processor, sample) == "there: <|image|>|<|im_end|>"


def test_a_bare_tokenizer_with_a_template_reads_text() -> None:
    made, _ = FAMILIES["qwen2_vl"]()
    tokenizer = made.tokenizer
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    processor = OmniProcessor(TemplateRenderer(tokenizer), {}, {})
    conversation = row("q b", "c")
    sample = processor.sample(conversation)
    messages = [{"role": "user", "content": "q b"}, {"role": "assistant", "content": "c"}]
    assert sample.input_ids.tolist() == tokenizer.apply_chat_template(messages, return_dict=False)
    assert trained(processor, sample) == "c<|im_end|>"


def test_positions_come_from_the_given_function() -> None:
    made, native = FAMILIES["qwen2_5_omni"]()
    calls: list[Any] = []

    def positions(ids: np.ndarray, token_inputs: Any, features: Any, *, audio_in_video: bool) -> np.ndarray:
        calls.append(({m: [sorted(f) for f in items] for m, items in features.items()}, audio_in_video))
        return np.stack([np.arange(len(ids))] * 3)

    processor = OmniProcessor(TemplateRenderer(made, dataclasses.replace(native, positions=positions)), {}, {})
    samples = [sample_of(processor, "i+a+i", "b"), sample_of(processor, "text", "b")]
    assert calls[0][0]["image"] == [["image_grid_thw", "pixel_values"]] * 2 and calls[1] == ({}, False)
    assert Pack.from_samples(samples).position_ids.shape == (3, 1, sum(map(len, samples)))


def test_token_types_come_from_the_given_function_and_must_be_the_processors() -> None:
    made, native = FAMILIES["gemma3"]()

    def types(ids: np.ndarray, trained: np.ndarray) -> dict[str, np.ndarray]:
        return {"token_type_ids": (ids == 4) | (trained & (ids == 0))}

    given = dataclasses.replace(native, token_types=types)
    processor = OmniProcessor(TemplateRenderer(made, given), {}, {})
    assert not sample_of(processor, "q", "b").token_inputs["token_type_ids"].any()
    assert sample_of(processor, "i", "b").token_inputs["token_type_ids"].sum() == 4
    wrong = dataclasses.replace(native, token_types=lambda ids, _: {"token_type_ids": ids * 0})
    with pytest.raises(UserError, match="gives different token_type_ids"):
        OmniProcessor(TemplateRenderer(made, wrong), {}, {}).sample(row("i", "b"))


def test_mixed_samples_share_a_pack() -> None:
    processor = processor_of("qwen2_5_omni")
    turns = [("i+i+x", "a"), ("v+x", "a"), ("a+x", "a"), ("x y", "a"), ("i+v+a+x", "a")]
    pack = Pack.from_samples([sample_of(processor, *turn) for turn in turns])
    assert {name: len(batch.num_tokens) for name, batch in pack.inputs.items()} == {
        "foundation.audio": 2, "foundation.image": 3, "foundation.video": 2,
    }  # fmt: skip
    for name, batch in pack.inputs.items():
        placeholder = {"image": 2, "video": 3, "audio": 4}[name.partition(".")[2]]
        assert (pack.input_ids[0, batch.positions] == placeholder).all()
        assert sum(batch.num_tokens) == int((pack.input_ids == placeholder).sum())


def test_no_random_conversation_has_rows_without_placeholders_or_a_cut_span() -> None:
    generator = random.Random(0)
    processors = {family: processor_of(family) for family in ("qwen2_5_omni", "gemma3", "internvl")}
    letters = {"qwen2_5_omni": "iavx", "gemma3": "ix", "internvl": "ix"}
    texts = ["x", "\nand", "two words", "é 漢字\n\n", " or"]
    overlong = 0
    for _ in range(200):
        family = generator.choice(sorted(processors))
        turns = []
        for _ in range(generator.randint(1, 2)):
            chosen = [generator.choice(letters[family]) for _ in range(generator.randint(1, 4))]
            turns += ["+".join(generator.choice(texts) if c == "x" else c for c in chosen), generator.choice(texts)]
        made = processors[family].sample(row(*turns), max_tokens=110)
        if isinstance(made, Rejected):
            assert made.is_overlong, made
            overlong += 1
            continue
        native = processors[family].renderer.native
        filled = np.concatenate([[], *(span.positions for span in made.spans)])
        placeholders = np.isin(made.input_ids, list(native.placeholders.values()))
        assert len(made) <= 110 and sorted(filled) == np.flatnonzero(placeholders).tolist()
        assert len(made.spans) == sum(t in {"i", "a", "v"} for turn in turns[::2] for t in turn.split("+"))
        assert not made.loss_mask[placeholders].any()
    assert 8 < overlong < 100


def test_a_worker_gets_the_same_processor() -> None:
    processor = processor_of("llava")
    copy = pickle.loads(pickle.dumps(processor))
    np.testing.assert_array_equal(sample_of(copy, "i", "b").input_ids, sample_of(processor, "i", "b").input_ids)


def test_a_saved_processor_is_the_same_processor(tmp_path: Path) -> None:
    made, native = FAMILIES["llava"]()
    arguments = {"images_kwargs": {"do_normalize": False}}
    processor = OmniProcessor(TemplateRenderer(made, native, arguments=arguments, max_frames=7), {}, {})
    processor.save_pretrained(tmp_path)
    loaded = OmniProcessor.from_pretrained(tmp_path, {}, {}, native)
    ours, theirs = sample_of(processor, "i+x", "b"), sample_of(loaded, "i+x", "b")
    np.testing.assert_array_equal(ours.input_ids, theirs.input_ids)
    pixels = [s.spans[0].item.features["pixel_values"] for s in (ours, theirs)]
    np.testing.assert_array_equal(*pixels)
    assert pixels[0].min() >= 0  # the arguments count


def test_a_recipe_names_processor_and_arguments(tmp_path: Path) -> None:
    made, native = FAMILIES["llava"]()
    made.save_pretrained(tmp_path)
    source = DataSource(path="rows.parquet")
    data = Data(train=[source], processor_arguments={"images_kwargs": {"do_normalize": False}})
    processor = OmniProcessor(TemplateRenderer.from_recipe(data, str(tmp_path), native), {}, {})
    assert sample_of(processor, "i", "b").spans[0].item.features["pixel_values"].min() >= 0
    with pytest.raises(ValueError, match=r"found 'U', but `processor` has its own chat template; remove"):
        Data(train=[source], processor=str(tmp_path), chat=ChatFormat(user="U", image="<image>"))


def test_a_folder_without_a_processor_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.processor: cannot load a HF processor from"):
        load_hf_processor(tmp_path)


def test_a_processor_without_template_or_media_token_is_refused() -> None:
    made, native = FAMILIES["llava"]()
    with pytest.raises(UserError, match=r"LlavaProcessor has no token for \['audio'\]"):
        TemplateRenderer(made, type(native)({"audio": 2}))
    made.chat_template = None
    with pytest.raises(UserError, match=r"has no chat template; set data\.processor to a processor that has one"):
        TemplateRenderer(made, native)


def test_an_argument_that_a_part_of_the_processor_does_not_know_is_refused(tmp_path: Path) -> None:
    made, native = FAMILIES["llava"]()
    made.save_pretrained(tmp_path)
    arguments = {"images_kwargs": {"do_normalise": False}}
    data = Data(train=[DataSource(path="rows.parquet")], processor_arguments=arguments)
    with pytest.raises(UserError, match=r"images_kwargs\.do_normalise: no such argument; did you mean `do_normalize`"):
        TemplateRenderer.from_recipe(data, str(tmp_path), native)


def test_a_modality_that_the_foundation_cannot_be_given_says_why() -> None:
    refusing = NativeInputs({}, refused={"audio": "its forward makes rows of no get_audio_features"})
    processor = OmniProcessor(TemplateRenderer(FAMILIES["qwen2_audio"]()[0], refusing), {}, {})
    asked = [{"role": "user", "content": [part("audio")]}]
    with pytest.raises(UserError, match=r"read no media \(the foundation cannot read it: its forward makes rows of no"):
        processor.sample(Row("r", "s", asked, {"audio": [b"sound"]}, {}))

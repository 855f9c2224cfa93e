import numpy as np
import pytest

from omnitrain.data.packing.sample import Rejected, Sample
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.render.renderer import ChatRenderer
from omnitrain.data.sources.rows import Row
from omnitrain.errors import UserError
from omnitrain.recipe import ChatFormat
from tests.tiny import CHAT, part, png, tiny_model, tiny_processor, tiny_row, tiny_tokenizer


@pytest.fixture(scope="module")
def processor() -> OmniProcessor:
    return tiny_processor(tiny_model())


def shown(processor: OmniProcessor, sample: Sample) -> str:
    """Tokens as text, trained ones in brackets, media rows as dots."""
    media = {s.start + i for s in sample.spans for i in range(s.item.num_tokens)}
    out = []
    for position, (token, trained) in enumerate(zip(sample.input_ids, sample.loss_mask, strict=True)):
        text = "." if position in media else processor.tokenizer.decode([int(token)])
        out.append(f"[{text}]" if trained else text)
    return "".join(out)


def row(*messages: tuple[str, list[dict]], images: int = 0) -> Row:
    return Row(
        "r", "s", [{"role": r, "content": c} for r, c in messages], {"image": [png(i) for i in range(images)]}, {}
    )


def test_only_assistant_content_and_its_end_are_trained(processor: OmniProcessor) -> None:
    conversation = row(
        ("system", [part("text", "s")]),
        ("user", [part("text", "ab")]),
        ("assistant", [part("text", "c")]),
        ("user", [part("text", "d")]),
        ("assistant", [part("text", "ef")]),
    )
    assert shown(processor, processor.sample(conversation)) == (
        "<|system|>s<|end|><|user|>ab<|end|><|assistant|>[c][<|end|>]<|user|>d<|end|><|assistant|>[e][f][<|end|>]"
    )


def test_read_images_are_context_and_written_ones_are_targets(processor: OmniProcessor) -> None:
    sample = processor.sample(
        row(("user", [part("image"), part("text", "a")]), ("assistant", [part("image"), part("text", "b")]), images=2)
    )
    assert shown(processor, sample) == (
        "<|user|><|image|>....a<|end|><|assistant|>[<|image|>]................[b][<|end|>]"
    )
    assert [(s.component, s.is_target) for s in sample.spans] == [("image_encoder", False), ("image_decoder", True)]


def test_a_prompt_stops_where_the_assistant_begins(processor: OmniProcessor) -> None:
    prompt = processor.prompt(tiny_row("text_to_image", 0))
    assert shown(processor, prompt) == "<|user|>what is it <|end|><|assistant|>"
    assert not prompt.spans


def test_string_content_is_text(processor: OmniProcessor) -> None:
    plain = Row("r", "s", [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], {}, {})
    assert shown(processor, processor.sample(plain)) == "<|user|>a<|end|><|assistant|>[b][<|end|>]"


def test_spans_fill_exactly_the_rows_that_the_component_declares(processor: OmniProcessor) -> None:
    sample = processor.sample(tiny_row("images_to_text", 3))
    starts = [span.start for span in sample.spans]
    assert starts == [2, 7]  # <|user|> <|image|> 4 rows <|image|> 4 rows
    np.testing.assert_array_equal(sample.position_ids, np.arange(len(sample)))


def test_a_part_without_its_file_rejects_the_row(processor: OmniProcessor) -> None:
    rejected = processor.sample(row(("user", [part("image")]), ("assistant", [part("text", "a")])))
    assert isinstance(rejected, Rejected) and "show image 1, but the row has 0 files" in rejected.reason


def test_a_file_that_no_part_shows_rejects_the_row(processor: OmniProcessor) -> None:
    messages = [{"role": "user", "content": "<image>\nwhich?"}, {"role": "assistant", "content": "7"}]
    rejected = processor.sample(Row("r", "s", messages, {"image": [png(0)]}, {}))
    assert isinstance(rejected, Rejected)
    reason = (
        "the row has 1 image files, but the messages show 0: each file needs a part of type image in a message "
        "(or <image> in its text, with "
    )
    assert rejected.reason == (
        f"{reason}`media_markers: [image]` of the data set, or `format: ms_swift` if its rows are of this format)"
    )
    nothing = {"image": [{"bytes": None, "path": None}], "audio": [None]}  # as columns of media are without any
    assert isinstance(processor.sample(Row("r", "s", messages, nothing, {})), Sample)


def test_a_row_of_which_nothing_is_trained_or_whose_answers_are_empty_is_rejected(processor: OmniProcessor) -> None:
    asked, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    nothing, empty = "nothing of the row is trained: no message of the assistant", "all answers of the row are empty"
    for messages, reason in (
        ([asked], nothing),
        ([asked, answer | {"train": False}], nothing),
        ([asked, answer | {"content": " \n"}], empty),
        ([asked, answer | {"content": ""}, asked, answer | {"content": []}], empty),
        ([asked, answer | {"weight": 0}, asked, answer | {"content": ""}], empty),
        ([asked, answer, asked, answer | {"content": ""}], None),
        ([asked, answer | {"content": [part("image")]}], None),
    ):
        row = Row("r", "s", messages, {"image": [png(0)] * ("image" in str(messages))}, {})
        made = processor.sample(row, max_tokens=3 if reason else None)
        assert isinstance(made, Rejected) == bool(reason)
        assert reason is None or (made.reason.startswith(reason) and not made.is_overlong)
        assert isinstance(processor.sample(row, may_ask=True), Sample)


def test_a_row_without_messages_is_no_sample(processor: OmniProcessor) -> None:
    rejected = processor.sample(Row("r", "s", [], {}, {}), without_tail=True)
    assert isinstance(rejected, Rejected) and rejected.reason == "no tokens: the row has no messages"


def test_what_a_component_stumbles_over_rejects_the_row(
    processor: OmniProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stumble(modality: str, media: object) -> None:
        raise IndexError("list index out of range")

    monkeypatch.setattr(processor.readers["image"]["image_encoder"], "prepare", stumble)
    rejected = processor.sample(tiny_row("image_to_text", 0))
    assert isinstance(rejected, Rejected)
    assert rejected.reason == "image 1: image_encoder cannot prepare this image: IndexError: list index out of range"


@pytest.mark.parametrize(
    "messages",
    [
        None,
        "text",
        [{"role": "user", "content": None}],
        [{"content": "a"}],
        [1],
        [{"role": "user", "content": "half of it: \ud83d"}],
    ],
)
def test_malformed_messages_cost_their_row(processor: OmniProcessor, messages: object) -> None:
    for make in (processor.sample, processor.prompt):
        rejected = make(Row("r", "s", messages, {}, {}))
        assert isinstance(rejected, Rejected) and "malformed messages" in rejected.reason


def test_unknown_roles_and_parts_name_what_is_allowed(processor: OmniProcessor) -> None:
    with pytest.raises(UserError, match="role 'robot': expected system, user or assistant"):
        processor.sample(row(("robot", [part("text", "a")])))
    with pytest.raises(UserError, match="type 'smell': expected text, image, audio, video"):
        processor.sample(row(("user", [part("smell")])))
    for kind, modality in {"image_url": "image", "input_audio": "audio"}.items():  # OpenAI's, with the file inside
        with pytest.raises(
            UserError, match=rf"write {{type: {modality}}} and put the file into the column `{modality}s`"
        ):
            processor.sample(row(("user", [part(kind)])))


def test_a_start_token_of_several_tokens_is_refused() -> None:
    model = tiny_model()
    chat = ChatFormat(**CHAT | {"image": "<picture>"})
    with pytest.raises(UserError, match=r"data\.chat\.image: '<picture>' must be one token"):
        OmniProcessor(ChatRenderer(tiny_tokenizer(), chat), *model.media_adapters())


def test_two_writers_after_one_start_token_are_refused() -> None:
    readers, writers = tiny_model().media_adapters()
    expected = r"image_decoder and second write image after the same start token; set `data\.chat\.starts: {second: "
    with pytest.raises(UserError, match=expected):
        OmniProcessor(
            ChatRenderer(tiny_tokenizer(), ChatFormat(**CHAT)),
            readers,
            {**writers, "second": writers["image_decoder"]},
        )

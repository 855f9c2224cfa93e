# ruff: noqa: RUF001
"""What is trained on of conversations with tools."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from omnitrain.data.chat.parts import is_trained
from omnitrain.data.loading.loader import require_usable
from omnitrain.data.packing.sample import Rejected, Sample
from omnitrain.data.render.native import NativeInputs
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.render.renderer import ChatRenderer
from omnitrain.data.render.template_renderer import TemplateRenderer
from omnitrain.data.sources.rows import Row, open_sources
from omnitrain.errors import UserError
from omnitrain.recipe import ChatFormat, DataSource
from tests.data.chat.tool_templates import GEMMA, HERMES, QWEN3, SPECIAL, TAGGED, TEMPLATES, TURNS
from tests.tiny import CHAT, part, png, tiny_tokenizer
from tests.tiny_processors import FAMILIES, byte_tokenizer

WEATHER = {"name": "weather", "description": "Of a place.", "parameters": {"type": "object"}}
TOOLS = [
    {"type": "function", "function": WEATHER},
    {"type": "function", "function": WEATHER | {"name": "clock", "description": "Of a zone."}},
]


def call(number: int, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": f"call0000{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def answer(number: int, name: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "name": name, "tool_call_id": f"call0000{number}", "content": text}


CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How is it in Paris?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [call(1, "weather", '{"place": "Paris", "days": 2}'), call(2, "clock", {"zone": 'é "CET"'})],
    },
    answer(1, "weather", "[18, 20]"),
    answer(2, "clock", "noon"),
    {"role": "assistant", "content": "Mild, at noon."},
    {"role": "user", "content": "And in {Rome}?"},
    {"role": "assistant", "content": "I look.", "tool_calls": [call(3, "weather", {})]},
    answer(3, "weather", "25"),
    {"role": "assistant", "content": "Warm."},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "Bye."},
]


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    made = byte_tokenizer(SPECIAL, bos_token="<s>", eos_token="</s>")
    made.chat_template = template
    return made


def as_transformers_takes_it(messages: list[dict[str, Any]], *, text_arguments: bool) -> list[dict[str, Any]]:
    messages = copy.deepcopy(messages)
    for message in messages:
        for one in message.get("tool_calls", ()):
            given = one["function"]["arguments"]
            given = json.loads(given) if isinstance(given, str) else given
            one["function"]["arguments"] = json.dumps(given, ensure_ascii=False) if text_arguments else given
        message.pop("weight", None)
    return messages


def by_hand(family: str, messages: list[dict[str, Any]]) -> tuple[list[int], list[bool]]:
    """Ids, and what is trained of the text that transformers renders, found by the tokens of the format alone."""
    owner = tokenizer(TEMPLATES[family])
    given = as_transformers_takes_it(messages, text_arguments=family == "deepseek")
    text = owner.apply_chat_template(given, tools=TOOLS, tokenize=False)
    spans = [match.span(1) for match in re.finditer(TURNS[family], text, re.DOTALL)]
    weights = [message.get("weight", 1) for message in messages if message["role"] == "assistant"]
    assert len(spans) == len(weights)
    encoded = owner(text, add_special_tokens=False, return_offsets_mapping=True)
    kept = [span for span, weight in zip(spans, weights, strict=True) if weight]
    return encoded["input_ids"], [any(a <= start < b for a, b in kept) for start, _ in encoded["offset_mapping"]]


def processor_of(template: str) -> OmniProcessor:
    return OmniProcessor(TemplateRenderer(tokenizer(template)), {}, {})


def made(template: str, messages: Any, tools: Any = TOOLS) -> Sample | Rejected:
    return processor_of(template).sample(Row("r", "s", messages, {}, {}, tools))


def weighted(*weights: int) -> list[dict[str, Any]]:
    left = iter(weights)
    return [m | {"weight": next(left)} if m["role"] == "assistant" else m for m in CONVERSATION]


def trained(template: str, messages: Any, tools: Any = TOOLS) -> list[str]:
    sample = made(template, messages, tools)
    assert isinstance(sample, Sample), sample
    runs = np.split(np.arange(len(sample)), np.flatnonzero(np.diff(sample.loss_mask)) + 1)
    return [tokenizer(template).decode(sample.input_ids[run]) for run in runs if sample.loss_mask[run[0]]]


@pytest.mark.parametrize("family", sorted(TEMPLATES))
@pytest.mark.parametrize("messages", [CONVERSATION, weighted(0, 1, 0, 1, 0), weighted(1, 0, 1, 0, 1)])
def test_tool_calls_are_trained_as_the_text_shows_them(family: str, messages: list[dict[str, Any]]) -> None:
    sample = made(TEMPLATES[family], messages)
    assert isinstance(sample, Sample), sample
    ids, mask = by_hand(family, messages)
    assert sample.input_ids.tolist() == ids
    np.testing.assert_array_equal(sample.loss_mask, mask)
    assert sample.loss_mask.any()


def test_a_turn_of_two_calls_without_content_is_trained_whole() -> None:
    assert trained(HERMES, CONVERSATION[:3]) == [
        '<tool_call>\n{"name": "weather", "arguments": {"place": "Paris", "days": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "clock", "arguments": {"zone": "é \\"CET\\""}}\n</tool_call><|im_end|>'
    ]


def test_reasoning_is_trained_where_the_template_writes_it() -> None:
    """It writes thoughts only after the last question. An answer without its thoughts must not be trained."""
    thinks = {"role": "assistant", "reasoning_content": "so"}
    reasoned = [m | thinks if m["role"] == "assistant" else m for m in CONVERSATION[:10]]
    rejected = made(QWEN3, reasoned)
    assert isinstance(rejected, Rejected)
    assert "does not write the thoughts (reasoning_content) of the assistant's message 3; give" in rejected.reason
    earlier = [m | {"weight": 0} if m in reasoned[:6] and m["role"] == "assistant" else m for m in reasoned]
    third, last = trained(QWEN3, earlier)
    assert third.startswith("<think>\nso\n</think>\n\nI look.\n<tool_call>")
    assert last == "<think>\nso\n</think>\n\nWarm.<|im_end|>"


@pytest.mark.parametrize("read", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("given", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_of_any_name_are_trained_by_a_template_that_reads_any_name(read: str, given: str) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.READ %}<think>{{ m.READ | trim }}</think>{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ).replace("READ", read)
    talk = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", given: " 5\n", "content": "5"}]
    assert trained(template, talk, None) == ["<think>5</think>5<|im_end|>"]


def test_a_template_without_thoughts_is_refused_for_rows_in_which_they_are_trained() -> None:
    plain = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    thinks = {"role": "assistant", "content": "5", "reasoning": "because"}
    with pytest.raises(UserError, match=r"row 'r' of 's': the chat template does not write thoughts"):
        made(plain, [CONVERSATION[1], thinks], None)
    talk = [CONVERSATION[1], thinks | {"loss": False}, CONVERSATION[1], thinks | {"reasoning": None, "content": "6"}]
    assert trained(plain, talk, None) == ["6<|im_end|>"]


def test_calls_of_sharegpt_are_those_of_openai(tmp_path: Path) -> None:
    said = [
        ("human", "How is it?"),
        ("function_call", '{"name": "weather", "arguments": {"place": "Paris"}}'),
        ("observation", "18"),
        ("gpt", "Mild."),
    ]
    record = {"conversations": [{"from": who, "value": what} for who, what in said], "tools": json.dumps(TOOLS)}
    (tmp_path / "rows.jsonl").write_text(json.dumps(record) + "\n")
    source = DataSource.model_validate({"path": str(tmp_path / "rows.jsonl"), "columns": {"messages": "conversations"}})
    messages = [
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "tool_calls": [call(1, "weather", {"place": "Paris"})]},
        {"role": "tool", "content": "18"},
        {"role": "assistant", "content": "Mild."},
    ]
    ours, theirs = processor_of(HERMES).sample(open_sources([source])[0][0]), made(HERMES, messages)
    assert isinstance(ours, Sample) and isinstance(theirs, Sample)
    assert ours.input_ids.tolist() == theirs.input_ids.tolist()
    assert ours.loss_mask.tolist() == theirs.loss_mask.tolist() and ours.loss_mask.sum() > 20


def test_a_template_with_generation_tags_is_trained_as_transformers_does() -> None:
    given = as_transformers_takes_it(CONVERSATION, text_arguments=False)
    theirs = tokenizer(TAGGED).apply_chat_template(
        given, tools=TOOLS, return_dict=True, return_assistant_tokens_mask=True
    )
    sample = made(TAGGED, CONVERSATION)
    assert isinstance(sample, Sample)
    assert sample.input_ids.tolist() == theirs["input_ids"]
    assert sample.loss_mask.tolist() == [bool(one) for one in theirs["assistant_masks"]]


@pytest.mark.parametrize("family", sorted(TEMPLATES))
def test_texts_that_spell_the_format_do_not_move_what_is_trained(family: str) -> None:
    spelled = (
        "<|im_end|>\n<|im_start|>assistant\n[/INST]</s><｜Assistant｜><end_of_turn>\n<start_of_turn>model\n<|eot_id|>x"
    )
    said = f"a {spelled} b"

    def talk(question: str, *answers: str) -> list[dict[str, Any]]:
        turns = [[("user", question), ("assistant", answer)] for answer in answers]
        return [{"role": role, "content": content} for turn in turns for role, content in turn]

    plain = trained(TEMPLATES[family], talk("q", "@", "@"), None)
    assert trained(TEMPLATES[family], talk(spelled, said, "c"), None) == [
        turn.replace("@", content) for turn, content in zip(plain, (said, "c"), strict=True)
    ]


def test_parquet_and_json_lines_make_the_same_sample(tmp_path: Path) -> None:
    """Its structs give each call the arguments of all calls, and each message the fields of all messages."""
    uniform = as_transformers_takes_it(CONVERSATION, text_arguments=False)
    Dataset.from_list([{"messages": uniform, "tools": json.dumps(TOOLS)}]).to_parquet(str(tmp_path / "rows.parquet"))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": CONVERSATION, "tools": TOOLS}) + "\n")
    paths = [tmp_path / "rows.parquet", tmp_path / "rows.jsonl"]
    samples = [processor_of(HERMES).sample(open_sources([DataSource(path=str(path))])[0][0]) for path in paths]
    ids, mask = by_hand("hermes", CONVERSATION)
    for sample in samples:
        assert isinstance(sample, Sample) and "null" not in tokenizer(HERMES).decode(sample.input_ids)
    assert samples[1].input_ids.tolist() == ids and samples[1].loss_mask.tolist() == mask
    written = [json.loads(text) for text in re.findall(r"<tool_call>\n(.*?)\n", trained_text(samples[0]))]
    assert [one["arguments"] for one in written] == [{"days": 2, "place": "Paris"}, {"zone": 'é "CET"'}, {}]


def trained_text(sample: Sample) -> str:
    return tokenizer(HERMES).decode(sample.input_ids[sample.loss_mask])


def test_an_image_in_a_conversation_with_tools_keeps_its_place() -> None:
    owner, _ = FAMILIES["gemma3"]()
    owner.tokenizer.add_tokens([token for token in SPECIAL if "function" in token], special_tokens=True)
    owner.chat_template = GEMMA
    shown = [
        {"role": "user", "content": [part("image"), part("text", "which?")]},
        {"role": "assistant", "content": None, "tool_calls": [call(1, "weather", {"place": "here"})]},
        answer(1, "weather", "wet") | {"content": [part("text", "wet"), part("image")]},
        {"role": "assistant", "content": [part("text", "Rain.")]},
    ]
    processor = OmniProcessor(TemplateRenderer(owner, NativeInputs({"image": 4})), {}, {})
    sample = processor.sample(Row("r", "s", shown, {"image": [png(0), png(1)]}, {}, TOOLS))
    assert isinstance(sample, Sample), sample
    assert [len(span.positions) for span in sample.spans] == [4, 4]
    assert owner.tokenizer.decode(sample.input_ids[sample.loss_mask]) == (
        "<start_function_call>call:weather{place:<escape>here<escape>}<end_function_call>Rain.<end_of_turn>"
    )


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (
            {"content": None, "tool_calls": [call(1, "weather", "{place")]},
            r"tool_calls\[0\].function.arguments: .*not valid JSON",
        ),
        ({"content": None, "tool_calls": [call(1, "weather", "[1]")]}, r"arguments: found \[1\]; expected an object"),
        (
            {"content": None, "tool_calls": [{"id": "1"}]},
            r"tool_calls\[0\]: found {'id': '1'}; expected an object with",
        ),
        ({"content": None, "tool_calls": 3}, "tool_calls: found 3; expected a list"),
        ({"content": None, "tool_calls": [call(1, "w\ud83d", {})]}, "surrogates not allowed"),
        ({"content": "a", "function_call": {"name": "weather"}}, "function_call: .*by `tool_calls`"),
        ({"content": None}, "content None"),
        ({"content": "a", "weight": 0.5}, r"weight 0\.5 of a message: expected 0 \(not trained\) or 1"),
        ({"content": "a", "weight": "0"}, "weight '0' of a message: expected 0"),
    ],
)
def test_a_message_that_is_none_costs_its_row(message: dict[str, Any], reason: str) -> None:
    rejected = made(HERMES, [CONVERSATION[1], {"role": "assistant", **message}])
    assert isinstance(rejected, Rejected) and re.search(reason, rejected.reason), rejected


@pytest.mark.parametrize("tools", ["[1", "{}x", [{"type": "function"}], 7])
def test_tools_that_are_none_cost_their_row(tools: Any) -> None:
    rejected = made(HERMES, CONVERSATION, tools)
    assert isinstance(rejected, Rejected) and rejected.reason.startswith("tools: found"), rejected


def test_a_template_without_tools_is_refused_for_rows_with_them() -> None:
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    with pytest.raises(UserError, match=r"row 'r' of 's': the chat template does not write `tools`"):
        made(plain, CONVERSATION)
    with pytest.raises(UserError, match=r"row 'r' of 's': the chat template does not write `tool_calls`"):
        made(plain, CONVERSATION, "[]")


@pytest.mark.parametrize(
    ("loop", "reason"),
    [
        ("{% for i in range(messages | length) %}{% set m = messages[i] %}", "writes message 2 in 0 places"),
        (
            "{% for m in messages %}{% if not loop.last %}{{ messages[loop.index].content }}{% endif %}",
            "inside the assistant's message 2",
        ),
        (
            "{% for m in messages %}{% for r in m.tool_responses or [] %}{{ r.response }}{% endfor %}",
            "inside the assistant's message 2",
        ),
        (
            "{% for m in messages %}{% set m = {'role': m.role, 'content': '-'} %}",
            "does not write the text of the assistant",
        ),
    ],
)
def test_what_cannot_be_told_is_an_error_of_the_row(loop: str, reason: str) -> None:
    turn = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    talk = [{"role": role, "content": "hello"} for role in ("user", "assistant", "user")]
    talk[1]["tool_responses"] = [{"name": "weather", "response": "25"}]
    rejected = made(loop + turn, talk, None)
    assert isinstance(rejected, Rejected) and reason in rejected.reason, rejected


def test_a_format_of_ones_own_refuses_tools_before_training(tmp_path: Path) -> None:
    asked = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "tools": None}
    processor = OmniProcessor(ChatRenderer(tiny_tokenizer(), ChatFormat(**CHAT)), {}, {})
    rows = [asked, {"messages": [*CONVERSATION[1:3]]}, {"messages": [*CONVERSATION[3:4]]}, asked | {"tools": TOOLS}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows[1]["messages"] = as_transformers_takes_it(CONVERSATION[1:3], text_arguments=True)
    Dataset.from_list(rows).to_parquet(str(tmp_path / "rows.parquet"))
    for file in ("rows.jsonl", "rows.parquet"):
        with pytest.raises(UserError) as caught:
            require_usable(open_sources([DataSource(path=str(tmp_path / file))]), processor)
        problems = str(caught.value).splitlines()
        assert len(problems) == 3 and "message role 'tool': expected system, user or assistant" in problems[1]
        assert "a message has ['tool_calls'], which a data.chat format cannot write" in problems[0]
        assert "the row has `tools`, which a data.chat format cannot write" in problems[2]


def test_a_weight_of_zero_is_not_trained_in_a_format_of_ones_own() -> None:
    processor = OmniProcessor(ChatRenderer(tiny_tokenizer(), ChatFormat(**CHAT)), {}, {})
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    weights = [talk[0] | {"weight": 0}, talk[1] | {"weight": 0}, talk[0], talk[1] | {"weight": 1}]
    sample = processor.sample(Row("r", "s", weights, {}, {}))
    assert isinstance(sample, Sample)
    assert np.flatnonzero(sample.loss_mask).tolist() == [10, 11] and len(sample) == 12
    for wrong, reason in (
        (talk[0] | {"weight": 1}, "role 'user': only assistant messages are trained"),
        ({"role": "assistant", "content": [part("image")], "weight": 0}, "such media are always trained"),
    ):
        with pytest.raises(ValueError, match=reason):
            is_trained(wrong)

import pytest
from transformers import PreTrainedTokenizerFast

from omnitrain.data.chat.chat_template import ChatTemplate
from tests.tiny_processors import byte_tokenizer

# As in Qwen3: reasoning is moved into a block of its own, dropped from earlier turns, and empty where there is none.
REASONING = (
    "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n{% else %}"
    "{% set said = m.content.split('</think>')[-1].lstrip('\n') %}{% set why = '' %}"
    "{% if '</think>' in m.content %}{% set why = m.content.split('</think>')[0].split('<think>')[-1] %}{% endif %}"
    "<|im_start|>assistant\n{% if loop.last %}<think>\n{{ why.strip('\n') }}\n</think>\n\n{% endif %}"
    "{{ said }}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INSTRUCT = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]"
    "{% else %} {{ m.content | trim }} </s>{% endif %}{% endfor %}"
)
CHANNELS = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>"
    "{{ m.content }}{{ '<|return|>' if m.role == 'assistant' and loop.last else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<s>", "</s>"]
SPECIAL += [f"<|{name}|>" for name in ("start", "end", "message", "channel", "return")]


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    made = byte_tokenizer(SPECIAL, eos_token="</s>")
    made.chat_template = template
    return made


def written(template: str, *turns: str) -> list[str]:
    owner = tokenizer(template)
    chat = ChatTemplate(owner, owner)
    messages = [{"role": "assistant" if i % 2 else "user", "content": turn} for i, turn in enumerate(turns)]
    text = chat.render(messages)
    assert text == owner.apply_chat_template(messages, tokenize=False)
    return [text[start:stop] for start, stop in chat.assistant_spans(text, messages)]


@pytest.mark.parametrize(
    ("template", "turns", "expected"),
    [
        (
            REASONING,
            ("q", "a", "r", "<think>\nso\n</think>\n\nb"),
            ["a<|im_end|>", "<think>\nso\n</think>\n\nb<|im_end|>"],
        ),
        (REASONING, ("q", "a", "r", "b"), ["a<|im_end|>", "<think>\n\n</think>\n\nb<|im_end|>"]),
        (INSTRUCT, ("q", "a\n", "r", " b"), [" a </s>", " b </s>"]),
        (
            CHANNELS,
            ("q", "a", "r", "b"),
            ["<|channel|>final<|message|>a<|end|>", "<|channel|>final<|message|>b<|return|>"],
        ),
    ],
)
def test_what_generation_would_write_is_the_assistants(
    template: str, turns: tuple[str, ...], expected: list[str]
) -> None:
    assert written(template, *turns) == expected


DEFAULT = "<|im_start|>system\nYou help.<|im_end|>\n"
TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
LOOP = "{% for m in messages %}"
IN_LOOP = LOOP + "{% if loop.first and m.role != 'system' %}" + DEFAULT + "{% endif %}" + TURN
BEFORE_LOOP = "{% if messages[0].role != 'system' %}" + DEFAULT + "{% endif %}" + LOOP + TURN
# As in Llama 3: the start of the text is in the first message.
WITH_START = (
    LOOP + "{% set text = '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' %}"
    "{% if loop.index0 == 0 %}{% set text = '<s>' + text %}{% endif %}{{ text }}{% endfor %}"
)
THINKING = REASONING.replace("{% else %}", "{% else %}{% if loop.first %}" + DEFAULT + "{% endif %}", 1)
NO_THOUGHTS = CHANNELS.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")  # as of DeepSeek R1


@pytest.mark.parametrize(
    ("template", "header"),
    [
        (IN_LOOP + PROMPT, ""),
        (BEFORE_LOOP + PROMPT, ""),
        (WITH_START + PROMPT, ""),
        (THINKING, ""),
        (IN_LOOP, "<|im_start|>assistant\n"),  # without a generation prompt, the header is generated, too
        (WITH_START, "<|im_start|>assistant\n"),
    ],
)
def test_a_conversation_that_begins_with_the_assistant_is_trained_from_where_generation_begins(
    template: str, header: str
) -> None:
    owner = tokenizer(template)
    chat = ChatTemplate(owner, owner)
    first, asked = {"role": "assistant", "content": "assistant\nHi"}, {"role": "user", "content": "q"}
    for turns in ([first], [first, asked], [first, asked, {"role": "assistant", "content": "Hm"}]):
        text = chat.render(turns)
        assert text == owner.apply_chat_template(turns, tokenize=False)
        said = [header + turn["content"] + "<|im_end|>" for turn in turns[::2]]
        if template == THINKING and turns[-1] != asked:  # the template writes this in the last turn
            said[-1] = "<think>\n\n</think>\n\n" + said[-1]
        assert [text[start:stop] for start, stop in chat.assistant_spans(text, turns)] == said


def test_a_part_of_an_answer_that_the_template_leaves_out_is_an_error_of_the_row() -> None:
    assert written(NO_THOUGHTS, "q", "a") == ["<|channel|>final<|message|>a<|return|>"]
    left_out = "does not write 'because' of the assistant's message 2; give this message a `weight` of 0"
    for answer in ("<think>\nbecause\n</think>\n\nso", "<think>because</think>so"):
        with pytest.raises(ValueError, match=left_out):
            written(NO_THOUGHTS, "q", answer)
    with pytest.raises(ValueError, match=left_out):
        written(REASONING, "q", "<think>\nbecause\n</think>\n\na", "r", "b")


def test_a_question_alone_has_no_answer() -> None:
    assert written(INSTRUCT, "q") == []


def test_the_end_of_an_answer_is_what_the_template_writes_last() -> None:
    ends = {}
    for name, template in (("REASONING", REASONING), ("INSTRUCT", INSTRUCT), ("CHANNELS", CHANNELS)):
        ends[name] = ChatTemplate(tokenizer(template), tokenizer(template)).end
    assert ends == {"REASONING": "<|im_end|>", "INSTRUCT": "</s>", "CHANNELS": "<|return|>"}


def test_a_template_that_hides_answers_is_refused_for_its_rows() -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content | upper | length }};{% endfor %}"
    with pytest.raises(ValueError, match="does not write the text of the assistant's message 2"):
        written(template, "q", "a")

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


def test_a_question_alone_has_no_answer() -> None:
    assert written(INSTRUCT, "q") == []


def test_the_end_of_an_answer_is_what_the_template_writes_last() -> None:
    ends = {
        name: ChatTemplate(tokenizer(t), tokenizer(t)).end
        for name, t in globals().items()
        if name.isupper() and isinstance(t, str)
    }
    assert ends == {"REASONING": "<|im_end|>", "INSTRUCT": "</s>", "CHANNELS": "<|return|>"}


def test_a_template_that_hides_answers_is_refused_for_its_rows() -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content | upper | length }};{% endfor %}"
    with pytest.raises(ValueError, match="does not write the text of the assistant's message 2"):
        written(template, "q", "a")

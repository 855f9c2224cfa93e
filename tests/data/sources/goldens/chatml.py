"""A tiny tokenizer with a ChatML template that every package can take, and the form in which goldens are compared.

This file and `rows.py` import nothing of omnitrain: the scripts beside them run in the environments of other packages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent
SPECIAL = [
    *("<|im_end|>", "<|im_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
    "<|pad|>",
]
IMAGE, VIDEO = (f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video"))

_TOOLS_INTRO = """\n\n# Tools\n
You may call one or more functions to assist with the user query.\n
You are provided with function signatures within <tools></tools> XML tags:\n<tools>"""
_TOOLS_END = """\n</tools>\n
For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>"""
# Tools as Qwen2.5 has them, since LLaMA-Factory and ms-swift write that text by themselves. The loop's `message` must
# have this name for axolotl.
_TEMPLATE = (
    "{%- macro show(c) %}{% if c is string %}{{ c }}{% else %}{% for p in c or [] %}"
    "{% if p.type == 'text' %}{{ p.text }}{% elif p.type == 'image' or p.type == 'image_url' %}IMAGE"
    "{% elif p.type == 'video' %}VIDEO{% endif %}{% endfor %}{% endif %}{% endmacro %}"
    "{%- if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ show(messages[0].content) }}{% endif %}"
    "{{ INTRO }}{% for t in tools %}{{ '\n' }}"
    "{{ (t if t.type == 'function' else {'type': 'function', 'function': t}) | tojson }}{% endfor %}"
    "{{ END }}<|im_end|>\n{% endif %}"
    "{%- for message in messages %}{% if message.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ show(message.content) }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% elif message.role == 'assistant' %}<|im_start|>assistant\n{% generation %}"
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ show(message.content) }}"
    "{% if message.tool_calls %}{% for t in message.tool_calls %}{{ '\n' if not loop.first }}<tool_call>\n"
    "{{ {'name': t.function.name, 'arguments': t.function.arguments} | tojson }}\n</tool_call>{% endfor %}{% endif %}"
    "<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% elif not (tools and loop.first and message.role == 'system') %}"
    "<|im_start|>{{ message.role }}\n{{ show(message.content) }}<|im_end|>\n{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATE = (
    _TEMPLATE.replace("IMAGE", IMAGE)
    .replace("VIDEO", VIDEO)
    .replace("INTRO", json.dumps(_TOOLS_INTRO))
    .replace("END", json.dumps(_TOOLS_END))
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and ChatML's tokens, with :data:`TEMPLATE`."""
    vocabulary = {token: i for i, token in enumerate(SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    of_bytes = Tokenizer(models.BPE(vocabulary, []))
    of_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    of_bytes.decoder = decoders.ByteLevel()
    of_bytes.add_special_tokens(SPECIAL)
    made = PreTrainedTokenizerFast(tokenizer_object=of_bytes, eos_token="<|im_end|>", pad_token="<|pad|>")
    made.chat_template = TEMPLATE
    return made


def summary(ids: Sequence[int], trained: Iterable[bool], tokens: PreTrainedTokenizerFast) -> dict[str, Any]:
    """The whole text and its trained pieces, each medium as one token, without the line break after a turn's end."""
    pieces, piece = [], []
    for token, is_trained in zip([*ids, 0], [*trained, False], strict=True):
        if is_trained:
            piece.append(token)
        elif piece:
            pieces.append(_plain(tokens.decode(piece)))
            piece = []
    return {"text": _plain(tokens.decode(list(ids))), "trained": pieces}


def _plain(text: str) -> str:
    return re.sub(r"(<\|(?:image|video)_pad\|>)+", r"\1", text).removesuffix("\n")


def save(package: str, goldens: dict[str, Any]) -> None:
    """Write the goldens that a package made, with its version."""
    content = {"made by": f"{package} {version(package)}", **goldens}
    (HERE / f"{package}.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")

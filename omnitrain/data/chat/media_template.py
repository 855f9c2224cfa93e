"""Chat templates for transformers, of a recipe's chat format, and with texts in the place of attached media."""

from __future__ import annotations

import json
from collections.abc import Mapping

from omnitrain.recipe import ChatFormat


def template_of(chat: ChatFormat, media: Mapping[str, str]) -> str:
    """Return the Jinja template that writes messages as ``chat`` does.

    ``media``: modality -> the text that stands for an item of it; others are left out.
    """
    openings = {role: getattr(chat, role) for role in ("system", "user", "assistant")}
    return (
        f"{{%- set openings = {_literal(openings)} -%}}{{%- set media = {_literal(media)} -%}}"
        "{%- for m in messages -%}{{- openings[m['role']] -}}"
        "{%- if m['content'] is string -%}{{- m['content'] -}}{%- else -%}{%- for c in m['content'] or [] -%}"
        "{{- c['text'] if c['type'] == 'text' else media.get(c['type'], '') -}}{%- endfor -%}{%- endif -%}"
        f"{{{{- {_literal(chat.end + chat.separator)} -}}}}{{%- endfor -%}}"
        "{%- if add_generation_prompt -%}{{- openings['assistant'] -}}{%- endif -%}"
    )


def template_with_media(template: str, media: Mapping[str, str]) -> str:
    """Return a chat template that shows ``media`` parts as text parts to ``template``.

    ``media``: modality -> the text that stands for an item of it; other parts stay as they are.
    """
    return (
        f"{{%- set media = {_literal(media)} -%}}{{%- set shown = namespace(messages=[]) -%}}"
        "{%- for m in messages -%}{%- if m['content'] is string or not m['content'] -%}"
        "{%- set shown.messages = shown.messages + [m] -%}{%- else -%}{%- set parts = namespace(all=[]) -%}"
        "{%- for c in m['content'] -%}{%- set parts.all = parts.all + "
        "[{'type': 'text', 'text': media[c['type']]} if c['type'] in media else c] -%}{%- endfor -%}"
        "{%- set shown.messages = shown.messages + [dict(m, content=parts.all)] -%}{%- endif -%}{%- endfor -%}"
        "{%- set messages = shown.messages -%}" + template
    )


def _literal(value: str | Mapping[str, str]) -> str:
    """Write texts, and dicts of texts, as Jinja reads them."""
    return json.dumps(value if isinstance(value, str) else dict(value), ensure_ascii=False)

"""Templates of exported models."""

from __future__ import annotations

from omnitrain.train.verbs.export import template_with_media
from tests.tiny import part, tiny_tokenizer
from tests.tiny_processors import chatml


def test_media_become_text_in_a_template_that_knows_text_alone() -> None:
    tokenizer = tiny_tokenizer()
    content = [part("image"), part("text", 'a "quote"'), part("image")]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "said"}]
    before = [{"role": "user", "content": [part("text", "[I]\n"), content[1], part("text", "[I]\n")]}, messages[1]]
    expected = tokenizer.apply_chat_template(before, chat_template=chatml(), tokenize=False)
    shown = template_with_media(chatml(), {"image": "[I]\n"})
    assert tokenizer.apply_chat_template(messages, chat_template=shown, tokenize=False) == expected
    assert expected.count("[I]") == 2

"""What a sample is without its condition, which samples lose it, and that no other one changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

import omnitrain as ot
from omnitrain.data.loading.row_processes import PreparedRows
from omnitrain.data.packing.sample import Sample
from omnitrain.data.render.native import NativeInputs
from omnitrain.data.render.processor import CONDITION, OmniProcessor, dropped_kinds
from omnitrain.data.sources.rows import Row
from omnitrain.recipe import ChatFormat
from omnitrain.recipe.data import ConditionDropout
from tests.data.render.test_processor import row, shown
from tests.tiny import CHAT, TASKS, part, tiny_model, tiny_processor, tiny_row, tiny_tokenizer
from tests.tiny_processors import chatml

IMAGE = "<|image|>" + 4 * "."
WRITTEN = "[<|image|>]" + 16 * "." + "[<|end|>]"


@pytest.fixture(scope="module")
def processor() -> OmniProcessor:
    return tiny_processor(tiny_model())


def by_template() -> OmniProcessor:
    """The same components with the chat template of a tokenizer."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = chatml()
    renderer = ot.data.TemplateRenderer(tokenizer, NativeInputs({}), starts=ChatFormat(**CHAT))
    return OmniProcessor(renderer, *tiny_model().media_adapters())


def edit() -> Row:
    """A picture of a picture and a text, and then one more of a text."""
    return row(
        ("system", [part("text", "s")]),
        ("user", [part("image"), part("text", "a")]),
        ("assistant", [part("image")]),
        ("user", [part("text", "b")]),
        ("assistant", [part("image")]),
        images=3,
    )


@pytest.mark.parametrize(
    ("dropped", "texts"),
    [
        ((), ("s", f"{IMAGE}a", "b")),
        (("text",), ("", IMAGE, "")),
        (("image",), ("s", "a", "b")),
        (CONDITION, ("", "", "")),
        (("audio", "video"), ("s", f"{IMAGE}a", "b")),
    ],
)
def test_messages_that_are_not_the_assistants_lose_their_parts(
    processor: OmniProcessor, dropped: tuple[str, ...], texts: tuple[str, ...]
) -> None:
    system, first, second = (f"{text}<|end|>" for text in texts)
    sample, whole = processor.sample(edit(), dropped=dropped), processor.sample(edit())
    assert shown(processor, sample) == (
        f"<|system|>{system}<|user|>{first}<|assistant|>{WRITTEN}<|user|>{second}<|assistant|>{WRITTEN}"
    )
    targets = [[span.item.features for span in one.spans if span.is_target] for one in (sample, whole)]
    assert [len(one) for one in targets] == [2, 2]
    for found, expected in zip(*targets, strict=True):  # pictures stay with the message that shows them
        assert all(np.array_equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("make", [lambda: tiny_processor(tiny_model()), by_template], ids=["chat", "template"])
@pytest.mark.parametrize("task", TASKS)
def test_an_unconditional_prompt_is_what_training_lets_the_answer_follow(
    make: Callable[[], OmniProcessor], task: str
) -> None:
    made, one = make(), tiny_row(task, 3)
    prompt = made.prompt(one, is_guided=True)
    assert isinstance(prompt, Sample) and prompt.unconditional is not None and not prompt.unconditional.spans
    assert len(prompt.unconditional) < len(prompt) and made.prompt(one).unconditional is None
    trained = made.sample(one, dropped=CONDITION)
    if task in ("text_to_image", "image_to_speech"):
        assert trained.input_ids[: len(prompt.unconditional)].tolist() == prompt.unconditional.input_ids.tolist()
    else:  # its answer has no media, so it loses nothing
        assert trained.input_ids.tolist() == made.sample(one).input_ids.tolist()


def test_chances_are_met_and_follow_from_seed_and_index_alone() -> None:
    dropout = ConditionDropout(whole=0.1, image=0.2)
    drawn = [dropped_kinds(dropout, 7, index) for index in range(4000)]
    counts = Counter(drawn)
    assert set(counts) == {frozenset(), frozenset({"image"}), CONDITION}
    assert counts[CONDITION] == pytest.approx(400, abs=60) and counts[frozenset({"image"})] == pytest.approx(
        720, abs=80
    )
    assert drawn[:50] == [dropped_kinds(dropout, 7, index) for index in range(50)]
    assert drawn != [dropped_kinds(dropout, 8, index) for index in range(4000)]
    assert dropped_kinds(ConditionDropout(), 7, 0) == frozenset()


def test_a_dropped_condition_changes_no_other_sample_and_caches_mix_nothing_up(processor: OmniProcessor) -> None:
    """A row that is drawn again, at another index, may lose it then or not."""
    rows = [tiny_row(task, seed) for seed, task in enumerate(TASKS)]
    dropped = partial(dropped_kinds, ConditionDropout(whole=0.5), 0)
    plain, some = (
        PreparedRows([rows], processor, cached=32),
        PreparedRows([rows], processor, cached=32, dropped=dropped),
    )
    lost = Counter()
    for index in range(8 * len(rows)):
        draw = (index, 0, index % len(rows))
        sample, whole = some[draw], plain[draw]
        writes = any(span.is_target for span in whole.spans)
        is_lost = writes and bool(dropped(index))
        lost[whole.id, is_lost] += 1
        expected = processor.sample(rows[index % len(rows)], dropped=CONDITION) if is_lost else whole
        assert sample.input_ids.tolist() == expected.input_ids.tolist() and sample.index == index
        assert (len(sample) < len(whole)) == is_lost
    assert {key for key, lose in lost if lose} == {"text_to_image/5", "image_to_speech/6"}
    assert lost["text_to_image/5", False] and lost["image_to_speech/6", False]

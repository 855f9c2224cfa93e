"""Samples that are too long, and packs with a budget of what each encoder reads."""

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from omnitrain.data.loading.loader import Packs, StepLoader, build_dataloader
from omnitrain.data.loading.measure import Measure, measure
from omnitrain.data.loading.slots import merge_states
from omnitrain.data.packing.budget import PackBudget, pack_all
from omnitrain.data.packing.sample import Rejected, Sample
from omnitrain.data.render.processor import OmniProcessor, sample_within
from omnitrain.data.sources.rows import Row, open_sources
from omnitrain.errors import DataError, UserError
from omnitrain.recipe import Data
from omnitrain.recipe.data import Overlong
from tests.data.loading.test_loader import data
from tests.data.render.test_template_renderer import processor_of
from tests.data.render.test_template_renderer import row as row_of
from tests.tiny import part, png, tiny_model, tiny_processor, tiny_row

LIMIT = 60
MEDIA_NAMES = {"image_encoder": ("image_encoder",), "audio_encoder": ("audio_encoder",)}


@pytest.fixture(scope="module")
def processor() -> OmniProcessor:
    return tiny_processor(tiny_model())


def conversation(turns: int, name: str = "chat", shown: tuple[int, ...] = (1, 3)) -> Row:
    """A system message, and turns of different lengths, some of which show an image."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": [part("text", "be brief")]}]
    for number in range(turns):
        image = [part("image")] if number in shown else []
        messages += [
            {"role": "user", "content": [*image, part("text", f"ask {number} " + "x" * (7 * number % 11))]},
            {"role": "assistant", "content": [part("text", f"say {number}")]},
        ]
    images = [png(number) for number in range(turns) if number in shown]
    return Row(name, "chat", messages, {"image": images, "audio": [], "video": []}, {})


def text_of(processor: OmniProcessor, sample: Sample) -> str:
    ids = [token for token, trained in zip(sample.input_ids.tolist(), sample.loss_mask, strict=True) if trained]
    return str(processor.tokenizer.decode(ids))


def images_of(samples: list[Sample]) -> list[np.ndarray]:
    return [span.item.features["pixel_values"] for one in samples for span in one.spans]


def test_a_conversation_is_split_between_turns_and_each_piece_has_the_system_message_and_its_media(
    processor: OmniProcessor,
) -> None:
    row = conversation(8)
    whole = processor.sample(row)
    assert isinstance(whole, Sample) and len(whole) > LIMIT
    first = sample_within(processor, row, PackBudget(LIMIT), "split")
    assert isinstance(first, Sample)
    pieces = list(first.pieces)
    assert len(pieces) > 2 and max(map(len, pieces)) <= LIMIT
    assert [(piece.piece, piece.num_pieces) for piece in pieces] == [(n, len(pieces)) for n in range(len(pieces))]
    assert "".join(text_of(processor, piece) for piece in pieces) == text_of(processor, whole)
    head = processor.tokenizer("be brief", add_special_tokens=False)["input_ids"]
    begins = {tuple(piece.input_ids[: len(head) + 1].tolist()) for piece in pieces}
    assert len(begins) == 1 and next(iter(begins)) == tuple(whole.input_ids[: len(head) + 1].tolist())
    assert [image.tolist() for image in images_of(pieces)] == [image.tolist() for image in images_of([whole])]


@pytest.mark.parametrize("family", ["qwen2_5_omni", "gemma3", "internvl"])
def test_conversations_of_chat_templates_are_split_without_losing_a_trained_token_or_a_medium(family: str) -> None:
    random, letters, processor = Random(0), {"qwen2_5_omni": "iavx"}.get(family, "ix"), processor_of(family)
    several = 0
    for _ in range(15):
        turns = []
        for _ in range(random.randint(2, 5)):
            asked = [random.choice(letters) for _ in range(random.randint(1, 3))]
            turns += ["+".join("two words" if c == "x" else c for c in asked), random.choice(["é 漢字", "x y", "ok"])]
        conversation = row_of(*turns)
        whole = processor.sample(conversation)
        assert isinstance(whole, Sample)
        first = sample_within(processor, conversation, PackBudget(150), "split")
        if isinstance(first, Rejected):
            assert "alone: " in first.reason and first.is_overlong
            continue
        several += len(first.pieces) > 1
        assert max(map(len, first.pieces)) <= 150
        trained = np.concatenate([piece.input_ids[piece.loss_mask] for piece in first.pieces])
        assert trained.tolist() == whole.input_ids[whole.loss_mask].tolist()
        spans = [span for piece in first.pieces for span in piece.spans]
        for ours, theirs in zip(spans, whole.spans, strict=True):
            assert (ours.component, ours.item.num_tokens) == (theirs.component, theirs.item.num_tokens)
            assert all(np.array_equal(array, theirs.item.features[name]) for name, array in ours.item.features.items())
    assert several > 3


def test_pieces_of_which_nothing_is_trained_are_left_out(processor: OmniProcessor) -> None:
    row = conversation(8, shown=())
    for message in row.messages[:-1]:
        if message["role"] == "assistant":
            message["weight"] = 0
    (piece,) = sample_within(processor, row, PackBudget(LIMIT), "split").pieces
    assert text_of(processor, piece) == "say 7<|end|>" and (piece.piece, piece.num_pieces) == (0, 1)


def test_pieces_are_as_long_as_fits(processor: OmniProcessor) -> None:
    row, budget = conversation(9), PackBudget(LIMIT)
    first = sample_within(processor, row, budget, "split")
    assert isinstance(first, Sample)
    turns = [text_of(processor, piece).count("say") for piece in first.pieces]
    assert sum(turns) == 9
    longer = conversation(turns[0] + 1, shown=(1,))
    assert isinstance(processor.sample(longer, max_tokens=LIMIT), Rejected)


def test_a_turn_that_is_too_long_alone_rejects_the_row(processor: OmniProcessor) -> None:
    row = conversation(4)
    row.messages[5]["content"] = [part("text", "y" * 200)]
    rejected = sample_within(processor, row, PackBudget(LIMIT), "split")
    assert isinstance(rejected, Rejected) and rejected.is_overlong
    assert rejected.reason.startswith("turn 3 of 4 alone: ") and f"at most {LIMIT}" in rejected.reason


def test_several_user_messages_and_tool_results_stay_in_their_turn(processor: OmniProcessor) -> None:
    roles = ["user", "user", "assistant", "assistant", "user", "assistant"]
    messages = [{"role": role, "content": f"{role[0]}{number} {'z' * 12}"} for number, role in enumerate(roles)]
    row = Row("r", "chat", messages, {}, {})
    whole = processor.sample(row)
    assert isinstance(whole, Sample)
    first = sample_within(processor, row, PackBudget(len(whole) - 1), "split")
    assert isinstance(first, Sample)
    assert ["a3" in text_of(processor, one) for one in first.pieces] == [True, False]
    assert ["a5" in text_of(processor, one) for one in first.pieces] == [False, True]


@pytest.mark.parametrize("overlong", ["drop", "error", "split"])
def test_each_data_set_says_what_to_do_with_long_samples(
    processor: OmniProcessor, tmp_path: Path, overlong: Overlong
) -> None:
    settings = data(tmp_path, [conversation(8, "long"), *(tiny_row("text", i) for i in range(6))], pack_tokens=LIMIT)
    (node,) = settings.train
    settings = settings.model_copy(update={"train": [node.model_copy(update={"overlong": overlong})]})
    loader = build_dataloader(settings, processor)
    if overlong == "error":
        with pytest.raises(DataError, match=r"'long': \d+ tokens, but a pack holds at most 60; raise the limit"):
            list(islice(loader, 8))
        return
    ids = [name for (pack,) in islice(loader, 8) for name in pack.info.ids]
    assert ("long" in ids) == (overlong == "split") and ("long" in loader.rejected) == (overlong == "drop")


def pieces_of(packs: Packs) -> list[tuple[int, int]]:
    return [sized for pack in packs for sized in zip(pack.info.indices, pack.info.lengths, strict=True)]


@pytest.fixture(scope="module")
def split_settings(tmp_path_factory: pytest.TempPathFactory) -> Data:
    rows = [conversation(3 + i % 7, f"chat {i}", shown=(i % 3,)) for i in range(12)]
    options: dict[str, Any] = {"packing_buffer": 5, "overlong": "split", "cached_samples": 50}
    return data(tmp_path_factory.mktemp("split"), rows, pack_tokens=LIMIT, **options)


def steps_of(settings: Data, processor: OmniProcessor, steps: int, ranks: int = 1, state: Any = None) -> Any:
    """The pieces of each step of all ranks, and the loaders."""
    options = {"seed": 2, "slots": 3, "ranks": ranks, "state": state}
    made = [build_dataloader(settings, processor, rank=rank, **options) for rank in range(ranks)]
    streams = [iter(one) for one in made]
    return [sorted(piece for stream in streams for piece in pieces_of(next(stream))) for _ in range(steps)], made


@pytest.fixture(scope="module")
def uncut(split_settings: Data, processor: OmniProcessor) -> list[list[tuple[int, int]]]:
    return steps_of(split_settings, processor, 8)[0]


@pytest.mark.parametrize(
    ("stop", "ranks", "workers"),
    [(3, 1, 0), pytest.param(4, 3, 0, marks=pytest.mark.second), pytest.param(6, 2, 2, marks=pytest.mark.second)],
)
def test_a_run_resumes_among_the_pieces_of_a_conversation(
    split_settings: Data, processor: OmniProcessor, uncut: Any, stop: int, ranks: int, workers: int
) -> None:
    begun, first = steps_of(split_settings, processor, stop, ranks)
    state = merge_states([one.state() for one in first])
    assert any(slot.held_pieces for slot in state.slots.values())
    helped = split_settings.model_copy(update={"workers": workers})
    assert begun + steps_of(helped, processor, 8 - stop, 4 - ranks, state)[0] == uncut


def budget(tokens: int, **elements: int) -> PackBudget:
    return PackBudget(tokens, elements, MEDIA_NAMES)


def images_per_pack(loader: StepLoader, steps: int) -> list[int]:
    batches = [pack.inputs.get("image_encoder") for (pack,) in islice(loader, steps)]
    groups = [() if batch is None else batch.groups for batch in batches]
    return [sum(len(group.num_tokens) for group in of_pack) for of_pack in groups]


def test_packs_keep_the_budget_of_each_encoder(processor: OmniProcessor, tmp_path: Path) -> None:
    made = [tiny_row("images_to_text" if i % 2 else "text", i) for i in range(24)]
    free = data(tmp_path, made, pack_tokens=600)
    most = max(images_per_pack(build_dataloader(free, processor), 12))
    one = processor.sample(made[1])
    assert isinstance(one, Sample) and one.elements == {"image_encoder": sum(map(elements, one.spans))}
    limit = {"image_encoder": 2 * one.elements["image_encoder"]}
    bounded = free.model_copy(update={"pack_elements": limit})
    found = images_per_pack(build_dataloader(bounded, processor, media_names=MEDIA_NAMES), 12)
    assert max(found) == 4 < most


def test_held_out_packs_keep_the_budget_too_and_a_larger_sample_is_alone(processor: OmniProcessor) -> None:
    samples = [
        sample for i in range(6) if isinstance(sample := processor.sample(tiny_row("images_to_text", i)), Sample)
    ]
    of_one = samples[0].elements["image_encoder"]
    for most, packs in ((2 * of_one, [2, 2, 2]), (of_one - 1, [1] * 6)):
        assert [len(pack.info.ids) for pack in pack_all(samples, budget(999, image_encoder=most))] == packs


def elements(span: Any) -> int:
    features: Mapping[str, np.ndarray] = span.item.features
    return sum(array.size for array in features.values())


def test_a_sample_with_more_than_an_encoders_budget_is_overlong_and_can_be_split(processor: OmniProcessor) -> None:
    row = conversation(4, shown=(0, 1, 3))
    whole = processor.sample(row)
    assert isinstance(whole, Sample)
    of_image = whole.elements["image_encoder"] // 3
    rejected = sample_within(processor, row, budget(999, image_encoder=2 * of_image))
    assert isinstance(rejected, Rejected) and rejected.is_overlong
    assert rejected.reason.startswith(f"image_encoder reads {3 * of_image:,} elements")
    first = sample_within(processor, row, budget(999, image_encoder=2 * of_image), "split")
    assert isinstance(first, Sample) and [len(piece.spans) for piece in first.pieces] == [2, 1]


def test_a_budget_of_an_unknown_encoder_is_an_error() -> None:
    with pytest.raises(UserError, match=r"pack_elements\.image_encode: unknown encoder; did you mean `image_encoder`"):
        budget(9, image_encode=3)
    with pytest.raises(UserError, match=r"pass the model's `media_names`"):
        PackBudget(9, {"image_encoder": 3})


def test_held_out_data_have_no_policy_of_their_own() -> None:
    given = {"train": [{"path": "a", "overlong": "split"}, {"path": "b"}], "overlong": "error"}
    assert Data.model_validate(given).overlong_of_sources() == ["split", "error"]


def test_the_pieces_of_a_conversation_are_measured_with_the_modalities_of_their_media(
    processor: OmniProcessor, tmp_path: Path
) -> None:
    (source,) = open_sources(data(tmp_path, [conversation(8)]).train)
    (found,) = measure(source, processor, most=1, budget=PackBudget(LIMIT), overlong="split", without_tails=False)
    assert isinstance(found, Measure) and found.num_pieces == len(found.pieces) > 2
    items = [dict(piece.items) for piece in found.pieces]
    assert sum(of_piece.get("image", 0) for of_piece in items) == 2 and set().union(*items) == {"image"}
    assert sum(piece.elements.get("image_encoder", 0) > 0 for piece in found.pieces) == sum(map(bool, items))

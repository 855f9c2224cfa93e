"""Guidance: logits are those of two plain forwards, and 1 is no guidance."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from omnitrain.data.packing.sample import Sample
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.errors import UserError
from omnitrain.models.omni import heads
from omnitrain.models.omni.generate import Answer, generate
from omnitrain.models.omni.model import OmniModel
from omnitrain.recipe import Sampling
from tests.tiny import TASKS, tiny_model, tiny_processor, tiny_row

SCALES = {"text": 1.5, "image_decoder": 3.0, "audio_decoder": 2.0}
GUIDED = {name: Sampling(guidance=scale) for name, scale in SCALES.items()}
START, END = {"image": 74, "audio": 184}, 215  # tokens that the model does draw


@pytest.fixture(scope="module")
def model() -> OmniModel:
    built = tiny_model(seed=3)
    built.config.condition_dropout = True
    return built


@pytest.fixture(scope="module")
def processor(model: OmniModel) -> OmniProcessor:
    made = tiny_processor(model)
    made.start_tokens, made.end_token = START, END
    return made


@pytest.fixture(scope="module")
def prompts(model: OmniModel) -> list[Sample]:
    rows = [tiny_row(task, seed) for seed, task in enumerate(TASKS)]
    return [tiny_processor(model).prompt(row, index, is_guided=True) for index, row in enumerate(rows)]


def recorded(
    monkeypatch: pytest.MonkeyPatch, model: OmniModel, processor: OmniProcessor, prompts: list[Sample], **options: Any
) -> tuple[list[Answer], list[Tensor]]:
    """Answers, and the logits from which each of their tokens was drawn."""
    logits: list[Tensor] = []

    def greedy(_: Any, of_rows: Tensor) -> Tensor:
        logits.extend(of_rows)
        return of_rows.argmax(dim=-1)

    monkeypatch.setattr(heads, "_sampler", lambda _: greedy)
    return generate(model, processor, prompts, max_new_tokens=24, **options), logits


@torch.no_grad()
def states_by_hand(model: OmniModel, prompt: str, tokens: Sequence[tuple[str, int]]) -> Tensor:
    """The states ``[tokens, hidden]`` from which a plain forward without a cache predicts the tokens of an answer."""
    ids = tiny_processor(model).tokenizer(prompt, add_special_tokens=False)["input_ids"]
    text = model.foundation.get_input_embeddings()
    of = {"text": text, **{name: decoder.embedding for name, decoder in model.decoders.items()}}
    rows = [text(torch.tensor(ids)), *(of[mode](torch.tensor([token])) for mode, token in tokens)]
    states = model.foundation.model(inputs_embeds=torch.cat(rows)[None], use_cache=False).last_hidden_state
    return states[0, len(ids) - 1 : -1]


@pytest.mark.parametrize("use_cache", [True, False])
def test_logits_are_those_of_two_plain_forwards_by_hand(
    model: OmniModel, processor: OmniProcessor, monkeypatch: pytest.MonkeyPatch, use_cache: bool
) -> None:
    precise = copy.deepcopy(model).double()
    row = tiny_row("text_to_image", 3)
    prompt = processor.prompt(row, is_guided=True)
    (answer,), logits = recorded(monkeypatch, precise, processor, [prompt], sampling=GUIDED, use_cache=use_cache)
    asked = row.messages[0]["content"][0]["text"]
    with_condition, without = (
        states_by_hand(precise, f"<|user|>{said}<|end|><|assistant|>", answer.tokens) for said in (asked, "")
    )
    of = {"text": precise.foundation.lm_head, **{name: d.head for name, d in precise.decoders.items()}}
    assert {"text", "image_decoder"} <= {mode for mode, _ in answer.tokens} and len(logits) == len(answer.tokens)
    for (mode, _), conditional, other, found in zip(answer.tokens, with_condition, without, logits, strict=True):
        c, u = of[mode](conditional), of[mode](other)
        expected = u + SCALES[mode] * (c - u)
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
        assert (expected - c).abs().max() > 0.1


def test_a_guidance_of_1_is_todays_output_to_the_bit_and_runs_no_other_row(
    model: OmniModel, processor: OmniProcessor, prompts: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    handle = model.foundation.lm_head.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    plain, before = recorded(monkeypatch, model, processor, prompts)
    ones = {name: Sampling(guidance=1.0) for name in SCALES}
    same, after = recorded(monkeypatch, model, processor, prompts, sampling=ones)
    handle.remove()
    assert set(rows) == {len(prompts)}
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert [answer.tokens for answer in same] == [answer.tokens for answer in plain]


def test_a_guided_batch_answers_as_each_prompt_alone_with_and_without_cache(
    model: OmniModel, processor: OmniProcessor, prompts: list[Sample]
) -> None:
    """Sampled, with media in prompts; guidance of one decoder alone leaves the others as they are."""

    def tokens(numbers: Sequence[int], sampling: dict[str, Sampling], **options: Any) -> list:
        some = [prompts[number] for number in numbers]
        options = {"max_new_tokens": 20, "sampling": sampling, "numbers": numbers} | options
        return [answer.tokens for answer in generate(model, processor, some, **options)]

    sampled = {name: Sampling(temperature=1.0, guidance=scale) for name, scale in SCALES.items()}
    numbers = range(len(prompts))
    together = tokens(numbers, sampled)
    assert together == [tokens([number], sampled)[0] for number in numbers]
    assert together == tokens(numbers, sampled, use_cache=False)
    assert {mode for answer in together for mode, _ in answer} == set(SCALES)
    unguided = {name: Sampling(temperature=1.0) for name in SCALES}
    plain = tokens(numbers, unguided)
    of_images = tokens(numbers, unguided | {"image_decoder": sampled["image_decoder"]})
    assert plain != of_images
    for one, other in zip(plain, of_images, strict=True):
        first = next((place for place, (mode, _) in enumerate(one) if mode == "image_decoder"), len(one))
        assert one[:first] == other[:first]


def test_a_model_that_never_lost_a_condition_warns(processor: OmniProcessor, prompts: list[Sample]) -> None:
    with pytest.warns(UserWarning, match=r"this model was trained without data\.condition_dropout"):
        generate(tiny_model(seed=3), processor, prompts[:1], max_new_tokens=1, sampling=GUIDED)


def test_prompts_that_cannot_be_guided_are_refused(model: OmniModel, processor: OmniProcessor) -> None:
    prompt = processor.prompt(tiny_row("text", 0))
    with pytest.raises(UserError, match=r"cannot be guided: make it with processor\.prompt\(row, is_guided=True\)"):
        generate(model, processor, [prompt], sampling=GUIDED)

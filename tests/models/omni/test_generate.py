from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode

from omnitrain.data.packing.sample import Sample
from omnitrain.data.render.native import NativeInputs
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.sources.media import Waveform
from omnitrain.models.omni import generate as generation
from omnitrain.models.omni.generate import generate
from omnitrain.models.omni.heads import _sampler
from omnitrain.models.omni.model import OmniModel
from omnitrain.recipe import Sampling
from tests.families import FAMILIES
from tests.models.plain import pair_of
from tests.tiny import TASKS, tiny_model, tiny_processor, tiny_row, tiny_tokenizer


@pytest.fixture(scope="module")
def model() -> OmniModel:
    return tiny_model(seed=3)


@pytest.fixture(scope="module")
def processor(model: OmniModel) -> OmniProcessor:
    return tiny_processor(model)


@pytest.fixture(scope="module")
def prompts(processor: OmniProcessor) -> list[Sample]:
    made = [processor.prompt(tiny_row(task, seed)) for seed, task in enumerate(TASKS)]
    assert len({len(prompt) for prompt in made}) > 3
    return made


def test_with_and_without_cache_the_same_tokens(
    model: OmniModel, processor: OmniProcessor, prompts: list[Sample]
) -> None:
    cached = generate(model, processor, prompts, max_new_tokens=40)
    plain = generate(model, processor, prompts, max_new_tokens=40, use_cache=False)
    assert [a.tokens for a in cached] == [a.tokens for a in plain]
    assert all(answer.tokens for answer in cached)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_batch_answers_as_each_prompt_alone(
    model: OmniModel,
    processor: OmniProcessor,
    prompts: list[Sample],
    monkeypatch: pytest.MonkeyPatch,
    temperature: float,
) -> None:
    # Tokens that this model does draw: items start and end at another step in every row.
    monkeypatch.setattr(processor, "start_tokens", {"image": 74, "audio": 41})
    sampling = {name: Sampling(temperature=temperature) for name in ("text", "image_decoder", "audio_decoder")}

    def tokens(numbers: Sequence[int]) -> list:
        some = [prompts[number] for number in numbers]
        answers = generate(model, processor, some, max_new_tokens=30, sampling=sampling, numbers=numbers)
        return [answer.tokens for answer in answers]

    together = tokens(range(len(prompts)))
    assert together == [tokens([number])[0] for number in range(len(prompts))]
    items = [[mode for mode, _ in answer] for answer in together]
    assert any(modes.count("image_decoder") >= 16 and modes[-1] == "text" for modes in items)
    assert max(len(modes) for modes in items) == 30


def test_media_of_all_prompts_are_encoded_together(model: OmniModel, processor: OmniProcessor) -> None:
    some = [processor.prompt(tiny_row("image_to_text", seed)) for seed in range(6)]
    images: list[int] = []
    handle = model.image_encoder.tower.register_forward_pre_hook(
        lambda _, args, kwargs: images.append(len(kwargs["pixel_values"])), with_kwargs=True
    )
    together = generate(model, processor, some, max_new_tokens=3)
    handle.remove()
    assert images == [6]
    assert [a.tokens for a in together] == [generate(model, processor, [p], max_new_tokens=3)[0].tokens for p in some]


def test_a_late_token_costs_no_more_operations_than_an_early_one_and_no_more_in_a_larger_batch(
    model: OmniModel, processor: OmniProcessor, prompts: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            operations[-1] += 1
            return func(*args, **(kwargs or {}))

    last = generation._Foundation.last

    def counted(self: Any) -> Any:
        operations.append(0)
        with Counting():
            return last(self)

    monkeypatch.setattr(generation._Foundation, "last", counted)
    costs = []
    for some in (prompts[:2], prompts):
        operations: list[int] = []
        generate(model, processor, some, max_new_tokens=12)
        assert len(operations) > 8
        costs += operations[1:]
    assert len(set(costs)) == 1


def test_tokens_are_drawn_as_often_as_they_are_probable() -> None:
    logits = torch.tensor([0.1, 0.6, 0.0, 0.3]).log().expand(1000, -1)
    grid = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    drawn = _sampler(Sampling(temperature=1.0))(lambda: grid, logits)
    assert drawn.bincount(minlength=4).tolist() == [100, 600, 0, 300]
    ends = torch.tensor([0.0, 1.0 - 2**-53], dtype=torch.float64)
    assert _sampler(Sampling(temperature=1.0, top_k=2))(lambda: ends, logits[:2]).tolist() == [1, 3]


@pytest.mark.parametrize("modality", ["image", "audio"])
def test_a_start_token_switches_to_its_decoder_until_the_item_is_whole_then_text_again(
    model: OmniModel, processor: OmniProcessor, prompts: list[Sample], monkeypatch: pytest.MonkeyPatch, modality: str
) -> None:
    letter = processor.tokenizer("a", add_special_tokens=False)["input_ids"][0]
    script = [letter, processor.start_tokens[modality], letter, letter, processor.end_token]
    monkeypatch.setattr("omnitrain.models.omni.heads._sampler", lambda sampling: _Script(script))
    name = {"image": "image_decoder", "audio": "audio_decoder"}[modality]
    answer = generate(model, processor, prompts[:1], max_new_tokens=60)[0]
    modes = [mode for mode, _ in answer.tokens]
    length = {"image": 16, "audio": 12}[modality]  # fixed length; max_tokens, for no end token was drawn
    assert modes == ["text"] * 2 + [name] * length + ["text"] * 3 and answer.is_finished
    assert answer.unfinished_item is None
    before, made, after = answer.parts
    assert (before, after) == ("a", "aa")
    assert isinstance(made, {"image": Image.Image, "audio": Waveform}[modality])


class _Script:
    """A sampler that says a script to the text head and token 1 to media heads."""

    def __init__(self, script: list[int]) -> None:
        self.script = script
        self.said = 0

    def __call__(self, uniform: object, logits: torch.Tensor) -> torch.Tensor:
        if logits.size(-1) < 100:
            return torch.ones(len(logits), dtype=torch.long)
        self.said += 1
        return torch.full((len(logits),), self.script[self.said - 1])


def test_the_length_limit_ends_text_and_leaves_out_media_cut_short(
    model: OmniModel, processor: OmniProcessor, prompts: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = [processor.tokenizer("a", add_special_tokens=False)["input_ids"][0], processor.start_tokens["image"]]
    monkeypatch.setattr("omnitrain.models.omni.heads._sampler", lambda sampling: _Script(script))
    answer = generate(model, processor, prompts[:1], max_new_tokens=10)[0]
    assert len(answer.tokens) == 10 and not answer.is_finished and answer.parts == ["a"]
    assert answer.unfinished_item == "image_decoder"


def test_sampling_follows_its_seed_and_top_k_one_is_greedy(
    model: OmniModel, processor: OmniProcessor, prompts: list[Sample]
) -> None:
    def tokens(seed: int, **sampling: float) -> list:
        how = {name: Sampling(**sampling) for name in ("text", "image_decoder", "audio_decoder")}
        answers = generate(model, processor, prompts, max_new_tokens=12, sampling=how, seed=seed)
        return [answer.tokens for answer in answers]

    assert tokens(0, temperature=1.0) == tokens(0, temperature=1.0)
    assert tokens(0, temperature=1.0) != tokens(1, temperature=1.0)
    assert tokens(0, temperature=1.0, top_k=1) == tokens(1, temperature=0.0)
    assert tokens(0, temperature=1.0, top_p=1e-6) == tokens(1, temperature=0.0)


def test_prompts_of_a_model_that_reads_by_itself_answer_together_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    both = pair_of(FAMILIES["glm4v"]())  # rows of images and videos have the same placeholder
    prompts = [probe.sample for probe in both.probes]
    assert {("image",), ("video",)} <= {probe.modalities for probe in both.probes}
    renderer = SimpleNamespace(native=NativeInputs(), grid_positions=lambda grid: None)
    processor: Any = SimpleNamespace(
        start_tokens={}, writers={}, end_token=199, tokenizer=tiny_tokenizer(), renderer=renderer
    )

    def tokens(some: list[Sample], **options: bool) -> list:
        return [answer.tokens for answer in generate(both.ours, processor, some, max_new_tokens=6, **options)]

    assert tokens(prompts) == tokens(prompts, use_cache=False) == [tokens([prompt])[0] for prompt in prompts]
    # Placeholders that are drawn are text: they take no row from the next prompt's media.
    placeholder = both.ours.native_inputs.placeholders["image"]
    script = [placeholder, placeholder, 5, 6, 7, 199] * 2
    monkeypatch.setattr("omnitrain.models.omni.heads._sampler", lambda sampling: _Script(script))
    assert tokens(prompts, use_cache=False) == [[("text", token) for token in script[:6]]] * len(prompts)

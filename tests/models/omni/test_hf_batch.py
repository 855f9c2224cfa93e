"""A batch of transformers gives the loss of the same samples as a pack, in a script and in HF ``Trainer``."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer

import omnitrain as ot
from omnitrain.errors import UserError
from tests.families import FAMILIES
from tests.tiny import tiny_model, tiny_processor, tiny_row, tiny_samples
from tests.tiny_processors import llava
from tests.train.test_native_foundation import save_llava

PAGE = Path(__file__).parents[3] / "docs" / "python.md"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ot.OmniModel:
    """A model that reads images by itself."""
    folder = tmp_path_factory.mktemp("llava")
    save_llava(folder)
    return ot.build_omni_model(foundation=str(folder), torch_dtype=torch.float32)


@pytest.fixture(scope="module")
def samples(model: ot.OmniModel) -> list[ot.Sample]:
    """Without, with one and with two images."""
    processor = ot.OmniProcessor(ot.data.TemplateRenderer(llava()[0], model.native_inputs), {}, {})
    rows = [tiny_row(task, seed) for seed, task in enumerate(("image_to_text", "text", "images_to_text", "text"))]
    return [processor.sample(row, index) for index, row in enumerate(rows)]


def batch_of(samples: list[ot.Sample], side: str = "right") -> dict[str, torch.Tensor]:
    """As a collator of transformers makes it: rows padded to the longest one."""
    length = max(len(sample.input_ids) for sample in samples)

    def padded(values: torch.Tensor, fill: int) -> torch.Tensor:
        missing = length - len(values)
        return nn.functional.pad(values, (0, missing) if side == "right" else (missing, 0), value=fill)

    ids = [torch.from_numpy(sample.input_ids) for sample in samples]
    labels = [row.where(torch.from_numpy(sample.loss_mask), -100) for row, sample in zip(ids, samples, strict=True)]
    pixels = [torch.from_numpy(span.item.features["pixel_values"]) for sample in samples for span in sample.spans]
    return {
        "input_ids": torch.stack([padded(row, 1) for row in ids]),
        "attention_mask": torch.stack([padded(torch.ones_like(row), 0) for row in ids]),
        "labels": torch.stack([padded(row, -100) for row in labels]),
        **({"pixel_values": torch.cat(pixels)} if pixels else {}),
    }


def gradients(model: ot.OmniModel, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_padded_batch_has_the_loss_and_the_gradients_of_a_pack(
    model: ot.OmniModel, samples: list[ot.Sample], side: str
) -> None:
    packed = model(ot.Pack.from_samples(samples)).loss
    output = model(**batch_of(samples, side))
    assert output.loss.item() == pytest.approx(packed.item(), rel=1e-5)
    assert output.logits.shape == (4, max(len(sample) for sample in samples), 272)
    expected, found = gradients(model, packed), gradients(model, output.loss)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert (gradient - found[name]).abs().max() <= 1e-5 * gradient.abs().max() + 1e-7, name


def features_with_images(sides: Sequence[tuple[int, int]], seed: int) -> dict[str, torch.Tensor]:
    """A conversation of Qwen2.5-VL with images of so many patches; two by two are a token."""
    draw = torch.Generator().manual_seed(seed)
    ids = [
        5 + seed,
        6,
        *(i for height, width in sides for i in (192, *[190] * (height * width // 4), 193)),
        7,
        8 + seed,
    ]
    input_ids = torch.tensor([ids])
    features = {"input_ids": input_ids, "labels": input_ids.where(input_ids < 190, -100)}
    features["mm_token_type_ids"] = (input_ids == 190).long()
    if sides:
        patches = sum(height * width for height, width in sides)
        features["pixel_values"] = torch.rand(patches, 3 * 2 * 4 * 4, generator=draw)
        features["image_grid_thw"] = torch.tensor([(1, *side) for side in sides])
    return features


def test_dicts_of_features_have_the_loss_of_the_models_own_forward_of_each() -> None:
    """Several images of other sizes in a conversation, positions with three axes, and a conversation without images."""
    torch.manual_seed(0)
    model = ot.build_omni_model(foundation=FAMILIES["qwen2_5_vl"](), torch_dtype=torch.float32)
    rows = [features_with_images(sides, seed) for seed, sides in enumerate(([(4, 4), (8, 4)], [], [(4, 8)]))]
    pack = ot.OmniDataCollatorWithPacking(model.native_inputs)(rows)
    assert pack.position_ids.shape == (3, 1, pack.num_tokens) and len(pack.inputs["foundation.image"].num_tokens) == 2
    counts = [int((row["labels"][:, 1:] != -100).sum()) for row in rows]
    losses = [model(**row).loss.item() for row in rows]
    expected = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    assert model(pack).loss.item() == pytest.approx(expected, rel=1e-5)


def test_hf_trainer_trains_an_omni_model_as_the_loop_over_packs_does(
    model: ot.OmniModel, samples: list[ot.Sample], tmp_path: Path
) -> None:
    """Two micro-batches per step with other numbers of trained tokens: both divide by the tokens of the step."""
    ours = copy.deepcopy(model)
    settings = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        remove_unused_columns=False,
        train_sampling_strategy="sequential",
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
    )
    theirs = copy.deepcopy(model)
    trainer = Trainer(theirs, settings, data_collator=batch_of, train_dataset=samples)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]

    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-2, weight_decay=0.0)
    plan_step, expected = ot.step_planner(ours), []
    for _ in range(2):
        packs = [ot.Pack.from_samples(samples[:2]), ot.Pack.from_samples(samples[2:])]
        expected.append(ot.accumulate_gradients(ours.train(), plan_step(packs)).item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses == pytest.approx(expected, rel=1e-4)
    trainer.save_model(str(tmp_path / "saved"))
    saved = dict(ot.build_omni_model(weights_path=str(tmp_path / "saved")).named_parameters())
    assert all(torch.equal(saved[name], parameter) for name, parameter in theirs.named_parameters())


def of_page() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(PAGE.read_text().split("```python\n")[4].split("```")[0], names)
    return names


def one_step(
    model: ot.OmniModel, samples: list[ot.Sample], folder: Path, micro_batches: int, **settings: Any
) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss that the page's trainer of packs logs, and the gradients that its optimizer gets."""
    trained = copy.deepcopy(model)
    plain = {
        "max_steps": 1,
        "optim": "sgd",
        "learning_rate": 1.0,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
    }
    plain |= {"remove_unused_columns": False, "use_cpu": True, "report_to": [], "save_strategy": "no"}
    rows = {"per_device_train_batch_size": len(samples) // micro_batches, "gradient_accumulation_steps": micro_batches}
    arguments = TrainingArguments(str(folder), logging_steps=1, disable_tqdm=True, **plain, **rows, **settings)
    pack = ot.OmniDataCollatorWithPacking()
    trainer = of_page()["PackTrainer"](
        trained, arguments, data_collator=lambda some: {"pack": pack(some)}, train_dataset=samples
    )
    trainer.train()
    before = dict(model.named_parameters())
    moved = {name: (before[name] - p).detach() for name, p in trainer.model.named_parameters() if p.requires_grad}
    return next(line["loss"] for line in trainer.state.log_history if "loss" in line), moved


def test_a_step_of_packs_has_the_gradients_of_one_pack_for_every_head_and_number_of_micro_batches(
    tmp_path: Path,
) -> None:
    """Some packs have no target of a decoder, or no media; the packs of a step differ in length."""
    model = tiny_model()
    samples = all_samples(model)
    assert len({len(sample) for sample in samples}) > 4
    pack = ot.Pack.from_samples(samples)
    assert len(pack.loss_counts()) == 3
    expected = gradients(model.train(), model(pack).loss)
    model.zero_grad()
    for number in (2, len(samples)):
        loss, found = one_step(model, samples, tmp_path, number)
        assert loss == pytest.approx(model(pack).loss.item(), rel=1e-5)
        for name, gradient in expected.items():
            assert (gradient - found[name]).abs().max() <= 1e-5 * gradient.abs().max() + 1e-6, (number, name)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated")
@pytest.mark.parametrize("family", ["qwen3_next", "tiny"])
def test_gradient_checkpointing_recomputes_layers_and_changes_no_gradient(family: str, tmp_path: Path) -> None:
    """Layers with a state know only from the pack's context where a sample begins, and experts keep their tokens."""
    torch.manual_seed(0)
    model = tiny_model() if family == "tiny" else ot.build_omni_model(foundation=FAMILIES[family]())
    samples = all_samples(model) if family == "tiny" else text_samples()
    calls = Counter[str]()
    for name, module in model.named_modules():
        if isinstance(module, GradientCheckpointingLayer):
            for child in module.children():
                child.register_forward_pre_hook(lambda *_, name=name: calls.update([name]))
    loss, expected = one_step(model, samples, tmp_path, 2)
    once, _ = dict(calls), calls.clear()
    recomputed, found = one_step(model, samples, tmp_path, 2, gradient_checkpointing=True)
    assert recomputed == loss and once and all(calls[name] == 2 * number for name, number in once.items())
    assert expected.keys() == found.keys() and all(torch.equal(found[name], one) for name, one in expected.items())


def text_samples() -> list[ot.Sample]:
    draw = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, 190, (length,), generator=draw) for length in (5, 17, 9, 30)]
    collate = ot.OmniDataCollatorWithPacking()
    return [collate.sample({"input_ids": row, "labels": row}, number) for number, row in enumerate(ids)]


def test_gradient_checkpointing_that_would_lose_the_samples_of_a_pack_is_refused() -> None:
    model = ot.build_omni_model(foundation=FAMILIES["qwen3"]())
    with pytest.raises(UserError, match="use_reentrant: found true; expected false"):
        model.activation_checkpointing_enable({"use_reentrant": True})
    model.takes_batches = False
    with pytest.raises(UserError, match="set enable_gradient_checkpointing=True of build_parallelize_model"):
        model.activation_checkpointing_enable()


def test_the_trainers_of_the_page_train_batches_and_packs_of_all_modalities(
    model: ot.OmniModel, samples: list[ot.Sample], tmp_path: Path
) -> None:
    names = of_page()
    for trained, train in (
        (copy.deepcopy(model), lambda one: names["train_with_hf"](one, samples, batch_of, tmp_path, steps=1)),
        (tiny_model(), lambda one: names["train_packs_with_hf"](one, all_samples(one), tmp_path, steps=1)),
    ):
        before = {name: p.clone() for name, p in trained.named_parameters() if p.requires_grad}
        train(trained)
        still = [name for name, p in trained.named_parameters() if name in before and torch.equal(p, before[name])]
        assert still == [name for name in still if name.startswith("foundation.model.vision_tower")]


def all_samples(model: ot.OmniModel) -> list[ot.Sample]:
    return tiny_samples(tiny_processor(model))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "found nothing; expected a Pack, or a batch of transformers with input_ids"),
        ({"labels": 1}, "found only labels; expected a Pack"),
        ({"pack": torch.zeros(1, 2)}, "found a Tensor; expected a Pack, or a batch by keyword"),
        ({"input_ids": 1, "pixel_valuess": 1}, "does not take pixel_valuess; did you mean `pixel_values`?"),
    ],
)
def test_what_is_no_pack_and_no_batch_is_refused_in_words(
    model: ot.OmniModel, arguments: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UserError, match=problem.replace("?", r"\?")):
        model(**arguments)


def test_a_pack_with_a_batch_and_a_batch_with_media_of_attached_components_are_refused(
    model: ot.OmniModel, samples: list[ot.Sample]
) -> None:
    with pytest.raises(UserError, match="found a pack and labels; expected a pack or a batch, not both"):
        model(ot.Pack.from_samples(samples), labels=torch.zeros(1, 2))
    with pytest.raises(
        UserError, match="Qwen3ForCausalLM does not take pixel_values; for audio_encoder, image_encoder"
    ):
        tiny_model(decoders={})(input_ids=torch.zeros(1, 2), pixel_values=torch.zeros(1, 3, 8, 8))

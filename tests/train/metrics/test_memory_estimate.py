from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Sample
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.attention.backends import sdpa
from omnitrain.recipe import Recipe
from omnitrain.train.metrics.memory_estimate import KeptMemory, _kept, measure_kept_memory
from omnitrain.train.trainer import Trainer
from tests.tiny import TASKS, png, tiny_model, tiny_processor, tiny_recipe, tiny_row, tiny_samples, wav, webp


@pytest.fixture(scope="module", autouse=True)
def _fused_attention() -> Iterator[None]:
    """As on CUDA, where memory is told; on CPU, short segments have explicit scores, which are kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sdpa, "SHORT", 0)
        yield


@pytest.fixture(scope="module")
def model() -> OmniModel:
    return tiny_model().train()


@pytest.fixture(scope="module")
def processor(model: OmniModel) -> OmniProcessor:
    return tiny_processor(model)


@pytest.fixture(scope="module")
def memory(model: OmniModel, processor: OmniProcessor) -> KeptMemory:
    return measure_kept_memory(model, tiny_samples(processor, len(TASKS)))


def one_large(processor: OmniProcessor, task: str, modality: str, files: list[bytes]) -> Pack:
    row = tiny_row(task, 1)
    row.media[modality] = files
    sample = processor.sample(row)
    assert isinstance(sample, Sample)
    return Pack.from_samples([sample])


@pytest.mark.parametrize("full_of", ["a long video", "a long clip", "large images", "text", "everything"])
def test_small_packs_tell_what_a_pack_keeps_that_is_full_of_anything(
    model: OmniModel, processor: OmniProcessor, memory: KeptMemory, full_of: str
) -> None:
    pack = {
        "a long video": lambda: one_large(processor, "video_to_text", "video", [webp(3, frames=60)]),
        "a long clip": lambda: one_large(processor, "speech_to_text", "audio", [wav(3, seconds=20.0)]),
        "large images": lambda: one_large(processor, "images_to_text", "image", [png(1, 64), png(2, 64)]),
        "text": lambda: Pack.from_samples(tiny_samples(processor, 1) * 60),
        "everything": lambda: Pack.from_samples(tiny_samples(processor, 70)),
    }[full_of]()
    assert memory.of(pack) == pytest.approx(_kept(model, pack), rel=0.1)


def test_full_packs_are_told_by_source_at_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(Recipe.load(str(tiny_recipe(tmp_path)), ["data.pack_tokens=1000000"]))
    trainer.show_memory()
    said = " ".join(capsys.readouterr().out.split())
    head = "a full pack of 1,000,000 tokens keeps about this much for its backward, in GiB: "
    told = {source: float(size) for source, size in (part.split() for part in said.removeprefix(head).split(", "))}
    assert told.keys() == set(TASKS)
    pack = Pack.from_samples(tiny_samples(trainer.processor, 1) * 100)
    assert told["text"] == pytest.approx(_kept(trainer.model, pack) / pack.num_tokens * 1e6 / 2**30, rel=0.1)
    assert not any(parameter.grad is not None for parameter in trainer.model.parameters())

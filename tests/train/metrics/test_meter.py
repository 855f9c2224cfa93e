import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omnitrain.data.packing.pack import Pack
from omnitrain.errors import TrainingError
from omnitrain.models.components.outputs import LossTerm, OmniOutput
from omnitrain.train.metrics.meter import LossMeter, MetricsFile
from tests.tiny import FOUNDATION, tiny_model, tiny_processor, tiny_samples


def test_counts_and_sums_stay_exact_past_two_to_the_24() -> None:
    tokens = 2**23 + 1
    rows = torch.zeros(tokens, dtype=torch.long)
    pack: Any = SimpleNamespace(info=SimpleNamespace(sources=("web",), lengths=(1,)))
    meter = LossMeter()
    for _ in range(5):
        term = LossTerm(torch.tensor(float(tokens)), tokens, torch.ones(()).expand(tokens))
        meter.add(pack, OmniOutput({"text": term}, {"text": rows}, None))
    expected = {"loss": 1.0, "tokens": 5 * tokens}
    assert meter.read() == {"heads": {"text": expected}, "sources": {"web": {"text": expected}}}


def test_samples_and_media_are_counted_by_source_and_survive_a_checkpoint() -> None:
    model = tiny_model()
    samples = tiny_samples(tiny_processor(model), 7)
    stand_in = dataclasses.replace(samples[1], index=-1)
    packs = [Pack.from_samples(samples[:3]), Pack.from_samples([*samples[3:], samples[4], stand_in])]
    meter, resumed, other = LossMeter(), LossMeter(), LossMeter()
    meter.add_samples(packs[:1], model.media_of_data)
    resumed.continue_from(meter.totals())
    for one in (meter, resumed):
        one.add_samples(packs[1:], model.media_of_data)
    (images,) = [sample for sample in samples if sample.source == "images_to_text"]
    found = meter.read()["data"]
    assert found == resumed.read()["data"] and "data" not in meter.read() and "data" not in other.read()
    assert {name: (one["samples"], one["tokens"]) for name, one in found.items()} == {
        sample.source: (2 if sample is images else 1, len(sample) * (2 if sample is images else 1))
        for sample in samples
    }
    assert found["images_to_text"]["media"] == {"image_encoder": {"items": 4, "tokens": 16}}
    assert found["image_to_speech"]["media"].keys() == {"image_encoder", "audio_decoder"}
    assert "media" not in found["text"] and found["image_to_text"]["media"]["image_encoder"]["items"] == 1


def test_the_media_of_data_have_the_names_of_whole_encoders_and_no_teacher() -> None:
    model = tiny_model(decoders={}, teachers={"teacher": FOUNDATION})
    whole = {name: (name,) for name in ("audio_encoder", "image_encoder")}
    assert model.media_of_data == whole
    model.divide(["image_encoder"])
    assert model.media_of_data == whole


def test_a_line_that_cannot_be_written_names_the_file(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(TrainingError, match=r"metrics\.jsonl cannot be written \(No space left on device\)"):
        metrics.write({"step": 1})


def test_a_line_that_a_crash_cut_behind_an_inner_brace_is_dropped_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 2, "heads": {"text": {"loss": 1.0}')
    MetricsFile(path, resume_step=1)
    assert path.read_text() == '{"step": 1}\n'

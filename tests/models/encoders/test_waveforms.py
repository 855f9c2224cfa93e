"""Towers that read waveforms: padding and packs change nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModel

from omnitrain.data.packing.sample import Sample
from omnitrain.data.sources.media import Waveform
from omnitrain.errors import UserError
from omnitrain.models.components.protocols import to_tensors
from omnitrain.models.encoders.towers import tower_from_source
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.train.verbs.verify import verify
from tests.models.encoders.test_encoders import encoder
from tests.parallel.laid_out import equals_one_sample_at_a_time
from tests.tiny import FOUNDATION, tiny_processor, tiny_samples

SPEECH: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "conv_dim": [8, 8, 8],
    "conv_kernel": [10, 3, 3],
    "conv_stride": [5, 4, 4],
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
}
STABLE = {"feat_extract_norm": "layer", "do_stable_layer_norm": True}
TOWERS = {
    "wav2vec2": SPEECH | {"model_type": "wav2vec2"},
    "wav2vec2 large": SPEECH | STABLE | {"model_type": "wav2vec2"},
    "hubert": SPEECH | {"model_type": "hubert"},
    "hubert large": SPEECH | STABLE | {"model_type": "hubert"},
    "wavlm": SPEECH | {"model_type": "wavlm"},
}
SPREADING = {  # padding would change frames: convolutions see what earlier ones made of it
    "conformer": SPEECH | {"model_type": "wav2vec2-conformer", "feat_extract_norm": "layer"},
    "data2vec": SPEECH | {"model_type": "data2vec-audio", "conv_pos_kernel_size": 5, "num_conv_pos_embeddings": 2},
}


def clip(samples: int) -> Waveform:
    return Waveform(np.random.default_rng(samples).normal(size=samples).astype(np.float32), 16000)


def omni(name: str) -> OmniModel:
    torch.manual_seed(0)
    spec = {"tower": {"config": TOWERS[name]}, "projector": {"kind": "pixel_shuffle"}}
    return build_omni_model(foundation=FOUNDATION, encoders={"audio_encoder": spec}).train()


def samples(model: OmniModel) -> list[Sample]:
    return tiny_samples(tiny_processor(model), 4, ["speech_to_text", "text"])


@pytest.mark.parametrize("name", [*TOWERS, *SPREADING])
@torch.no_grad()
def test_frames_of_clips_in_one_batch_are_those_that_transformers_gives_for_each(name: str) -> None:
    model = encoder((TOWERS | SPREADING)[name], "linear").train()
    prepared = [model.adapter().prepare("audio", clip(size)) for size in (1600, 3333, 900)]
    assert all(not 0 < p < 1 for p in (model.tower.config.hidden_dropout, model.tower.config.layerdrop))
    padded = "large" in name
    calls = [[one for one, _ in prepared]] if padded else [[one] for one, _ in prepared]
    counts = [tuple(count for _, count in prepared)] if padded else [(count,) for _, count in prepared]
    joined = [to_tensors({key: np.concatenate([one[key] for one in call]) for key in call[0]}) for call in calls]
    found = torch.cat([model.lm_encode(*call) for call in zip(joined, counts, strict=True)])
    plain = AutoModel.from_config(model.tower.config).train()  # batch norms of a conformer tell it from eval()
    plain.load_state_dict(model.tower.state_dict())
    for (features, count), got in zip(prepared, found.split([count for _, count in prepared]), strict=True):
        values = torch.from_numpy(features["input_values"]).view(1, -1)
        expected = model.projector(plain(values).last_hidden_state[0])
        assert len(expected) == count
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_a_tower_that_is_given_ready_draws_nothing_and_keeps_its_weights() -> None:
    ready = AutoModel.from_config(AutoConfig.for_model(**TOWERS["hubert"]))
    ready.feature_extractor.requires_grad_(False)
    spec = {"tower": ready, "projector": {"kind": "linear"}}
    part = build_omni_model(foundation=FOUNDATION, encoders={"audio_encoder": spec}).train().audio_encoder
    config, weights = part.tower.config, part.tower.state_dict()
    assert (config.layerdrop, config.hidden_dropout, config.mask_time_prob) == (0, 0, 0)
    assert all(torch.equal(value, ready.state_dict()[name]) for name, value in weights.items())
    assert part.lm_encode(*part.minimal_input()).isfinite().all()
    frozen = {name for name, parameter in part.tower.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name in weights if name.startswith("feature_extractor.")}
    assert tower_from_source(part.tower, "audio", torch.float32) is part.tower  # nothing is left to switch off


def test_a_tower_on_meta_stays_there() -> None:
    with torch.device("meta"):
        ready = AutoModel.from_config(AutoConfig.for_model(**TOWERS["wav2vec2"]))
    assert {one.device.type for one in tower_from_source(ready, "audio", torch.float32).parameters()} == {"meta"}


@pytest.mark.parametrize("name", TOWERS)
def test_a_pack_of_clips_has_the_gradients_of_one_sample_at_a_time(name: str) -> None:
    model = omni(name)
    given = samples(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert equals_one_sample_at_a_time(model, given) == trained


def large() -> OmniModel:
    return omni("wav2vec2 large")


def base() -> OmniModel:
    return omni("hubert")


@pytest.mark.slow
@pytest.mark.parametrize("make", [base, large])
def test_ranks_with_other_clips_train_as_one_process(ranks: RankPool, make: Any) -> None:
    report = verify(make, samples(make()), ["dp2.recompute"], nproc=2, pool=ranks)
    assert report.ok, report


def test_what_a_waveform_tower_cannot_read_is_said() -> None:
    with pytest.raises(ValueError, match="a clip of 10 samples is too short for HubertModel"):
        encoder(TOWERS["hubert"]).adapter().prepare("audio", clip(10))
    with pytest.raises(UserError, match="WhisperFeatureExtractor makes no waveforms, which HubertModel reads"):
        encoder(TOWERS["hubert"], processor={"feature_extractor_type": "WhisperFeatureExtractor"}).adapter()

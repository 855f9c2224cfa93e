"""MelVQ: lengths, the nearest code, sound that survives the round trip, weights that survive the disk."""

import math

import pytest
import torch
from transformers import AutoConfig, AutoModel

from omnitrain.models.decoders.mel_vq import MelVQ, griffin_lim, linear_magnitude, log_mel, num_codes
from omnitrain.recipe.component_configs import MelVQConfig

CONFIG = MelVQConfig(codebook_size=16)


@pytest.fixture
def model() -> MelVQ:
    torch.manual_seed(0)
    return MelVQ(CONFIG)


def tone(hertz: float, num_samples: int = 3200) -> torch.Tensor:
    return 0.5 * torch.sin(2 * math.pi * hertz / CONFIG.sampling_rate * torch.arange(num_samples))


@pytest.mark.parametrize("num_samples", [1, 319, 320, 321, 4000])
def test_lengths_agree_from_samples_to_frames_to_codes_to_samples(model, num_samples):
    frames = log_mel(torch.randn(num_samples) * 0.1, model.config)
    codes = model.encode(frames)
    assert frames.shape == (math.ceil(num_samples / 320) * 4, 40) and frames.dtype == torch.float32
    assert codes.shape == (num_codes(num_samples, model.config),) and codes.dtype == torch.int64
    assert model.decode(codes).shape == (len(codes) * 320,)


def test_log_mel_of_a_tone_peaks_in_its_band_at_its_amplitude():
    frames = log_mel(tone(1000.0), CONFIG)
    loudest = frames[10].argmax()
    assert loudest == log_mel(tone(1010.0), CONFIG)[10].argmax() != log_mel(tone(2000.0), CONFIG)[10].argmax()
    assert 0.3 < frames[10].max().exp() < 1.0


def test_log_mel_of_silence_is_the_floor():
    assert torch.allclose(log_mel(torch.zeros(500), CONFIG), torch.tensor(CONFIG.floor).log())


def test_encode_finds_the_nearest_vector(model):
    vectors = torch.randn(50, model.codebook.size(1))
    expected = torch.cdist(vectors, model.codebook).argmin(1)
    assert torch.equal(model.encode(vectors.view(-1, 40)), expected)


def test_codebook_vectors_encode_to_themselves(model):
    assert torch.equal(model.encode(model.codebook.view(-1, 40)), torch.arange(16))


def test_clips_end_to_end_encode_as_they_do_alone(model):
    clips = [log_mel(tone(300.0, 700), model.config), log_mel(tone(900.0, 1300), model.config)]
    assert torch.equal(model.encode(torch.cat(clips)), torch.cat([model.encode(clip) for clip in clips]))


def test_griffin_lim_gives_back_the_tone():
    wave = griffin_lim(linear_magnitude(log_mel(tone(1000.0), CONFIG), CONFIG), CONFIG)
    assert wave.shape == (3200,)
    assert torch.fft.rfft(wave).abs().argmax().item() * 8000 / 3200 == pytest.approx(1000, abs=15)
    assert wave.abs().max() == pytest.approx(0.5, abs=0.2)


def test_decode_is_deterministic_and_leaves_the_global_generator_alone(model):
    codes = torch.arange(16)
    state = torch.get_rng_state()
    assert torch.equal(model.decode(codes), model.decode(codes))
    assert torch.equal(torch.get_rng_state(), state)


def test_decoded_sound_never_clips(model):
    assert model.decode(torch.arange(16)).abs().max() <= 1.0


def test_no_codes_are_no_samples(model):
    assert model.decode(torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_save_and_load_are_bitwise(model, tmp_path):
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert isinstance(loaded, MelVQ) and torch.equal(loaded.codebook, model.codebook)
    assert loaded.dtype == torch.float32
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == loaded.config.to_dict()
    codes = torch.tensor([3, 1, 4])
    assert torch.equal(loaded.decode(codes), model.decode(codes))


def test_mistakes_say_what_was_found(model):
    with pytest.raises(ValueError, match=r"\[2, 40\], expected \[n \* 4, 40\]"):
        model.encode(torch.zeros(2, 40))
    with pytest.raises(ValueError, match=r"codes 3..16 outside of the codebook, 0..15"):
        model.decode(torch.tensor([3, 16]))
    with pytest.raises(ValueError, match=r"shape \[2, 100\]"):
        log_mel(torch.zeros(2, 100), model.config)
    with pytest.raises(ValueError, match=r"shape \[0\]"):
        log_mel(torch.zeros(0), model.config)
    with pytest.raises(ValueError, match="more than half of n_fft 256"):
        MelVQ(MelVQConfig(hop_length=200))

import io
import sys

import numpy as np
import pytest
import soundfile
from PIL import Image

from omnitrain.data.sources.media import (
    Waveform,
    decode_audio,
    decode_clip,
    decode_image,
    decode_soundtrack,
    decode_video,
)
from tests.tiny import png, wav, webp


@pytest.mark.parametrize("decode", [decode_image, decode_audio, lambda data: decode_video(data, 4)])
@pytest.mark.parametrize("data", [b"", b"garbage", b"\x89PNG\r\n\x1a\n broken"])
def test_damage_is_a_value_error_that_says_so(decode, data: bytes) -> None:
    with pytest.raises(ValueError, match=r"unreadable|without"):
        decode(data)


def test_cut_files_are_damage() -> None:
    with pytest.raises(ValueError, match="unreadable image"):
        decode_image(png(0)[:60])


def test_long_videos_are_sampled_evenly_with_both_ends() -> None:
    frames = decode_video(webp(0, frames=9), max_frames=5)
    every = decode_video(webp(0, frames=9), max_frames=9)
    assert [f.tobytes() for f in frames] == [every[i].tobytes() for i in (0, 2, 4, 6, 8)]


def test_a_video_tells_how_many_of_its_kept_frames_pass_in_a_second() -> None:
    stream = io.BytesIO()
    images = [Image.new("RGB", (4, 4), (i, 0, 0)) for i in range(9)]
    images[0].save(stream, format="PNG", save_all=True, append_images=images[1:], duration=250)
    assert decode_clip(stream.getvalue(), max_frames=9).rate == pytest.approx(4)
    assert decode_clip(stream.getvalue(), max_frames=3).rate == pytest.approx(1)
    assert decode_clip(stream.getvalue(), max_frames=1).rate is None


def test_animations_have_no_sound_and_other_videos_name_what_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decode_soundtrack(webp(0)) is None
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ValueError, match=r"other formats need PyAV: pip install 'omnitrain\[video\]'"):
        decode_soundtrack(b"\0\0\0 ftypisom")


def test_sound_that_is_not_finite_is_damage() -> None:
    stream = io.BytesIO()
    soundfile.write(stream, np.array([0.1, np.nan, 0.2]), 8000, format="WAV", subtype="FLOAT")
    with pytest.raises(ValueError, match="NaN or infinite"):
        decode_audio(stream.getvalue())


def test_sixteen_bit_images_are_scaled_not_clipped() -> None:
    stream = io.BytesIO()
    Image.fromarray(np.array([[0, 257 * 100, 65535]], dtype=np.uint16)).save(stream, format="PNG")
    assert [pixel[0] for pixel in np.asarray(decode_image(stream.getvalue()))[0]] == [0, 100, 255]


def test_channels_are_averaged() -> None:
    stream = io.BytesIO()
    soundfile.write(stream, np.array([[0.5, 0.0]] * 10), 8000, format="WAV", subtype="FLOAT")
    np.testing.assert_allclose(decode_audio(stream.getvalue()).samples, 0.25)


@pytest.mark.parametrize("rate", [4000, 16000, 22050])
def test_resampling_keeps_a_tone(rate: int) -> None:
    tone = Waveform(np.sin(2 * np.pi * 440 * np.arange(8000) / 8000).astype(np.float32), 8000)
    expected = np.sin(2 * np.pi * 440 * np.arange(rate) / rate)
    np.testing.assert_allclose(tone.resampled(rate).samples, expected, atol=1e-5)


def test_own_rate_is_untouched() -> None:
    sound = decode_audio(wav(0))
    assert sound.resampled(8000) is sound


@pytest.mark.parametrize("rate", [8000, 12000, 16000])
def test_resampling_keeps_the_highest_frequency_of_an_even_length(rate: int) -> None:
    """The Nyquist tone of 8 kHz: alternating samples there, the same cosine at any other rate."""
    low, high = (
        Waveform(np.resize([0.5, -0.5], 80).astype(np.float32), 8000),
        0.5 * np.cos(np.pi * np.arange(80 * rate // 8000) * 8000 / rate),
    )
    np.testing.assert_allclose(low.resampled(rate).samples, high, atol=1e-6)
    np.testing.assert_allclose(Waveform(high.astype(np.float32), rate).resampled(8000).samples, low.samples, atol=1e-6)

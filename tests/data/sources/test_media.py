import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import AvifImagePlugin, ExifTags, Image, ImageSequence

from omnitrain.data.sources import clips
from omnitrain.data.sources.media import (
    MediaFile,
    Waveform,
    decode_audio,
    decode_clip,
    decode_image,
    decode_soundtrack,
)
from omnitrain.data.sources.rows import Row
from tests.tiny import png, wav, webp


@pytest.mark.parametrize("decode", [decode_image, decode_audio, lambda file: decode_clip(file, 4)])
@pytest.mark.parametrize("data", [b"", b"garbage", b"\x89PNG\r\n\x1a\n broken"])
def test_damage_is_a_value_error_that_says_so(decode, data: bytes) -> None:
    with pytest.raises(ValueError, match=r"unreadable|without"):
        decode(MediaFile.of(data))


def test_cut_files_are_damage() -> None:
    with pytest.raises(ValueError, match="unreadable image"):
        decode_image(MediaFile.of(png(0)[:60]))


def test_long_videos_are_sampled_evenly_with_both_ends() -> None:
    frames = decode_clip(MediaFile.of(webp(0, frames=9)), max_frames=5).frames
    every = decode_clip(MediaFile.of(webp(0, frames=9)), max_frames=9).frames
    assert [f.tobytes() for f in frames] == [every[i].tobytes() for i in (0, 2, 4, 6, 8)]


@pytest.mark.parametrize("kind", ["PNG", "GIF", "WEBP", "AVIF"])
def test_a_video_tells_how_many_of_its_kept_frames_pass_in_a_second(kind: str) -> None:
    stream = io.BytesIO()
    images = [Image.new("RGB", (16, 16), (20 * i, 0, 0)) for i in range(9)]
    images[0].save(stream, format=kind, save_all=True, append_images=images[1:], duration=250)
    file = MediaFile(stream)
    assert decode_clip(file, max_frames=9).rate == pytest.approx(4)
    assert decode_clip(file, max_frames=3).rate == pytest.approx(1)
    assert decode_clip(file, max_frames=1).rate is None


def test_animations_have_no_sound_and_other_videos_name_what_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decode_soundtrack(MediaFile.of(webp(0))) is None
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ValueError, match=r"other formats need PyAV: pip install 'omnitrain\[video\]'"):
        decode_soundtrack(MediaFile.of(b"\0\0\0 ftypisom"))


def test_sound_that_is_not_finite_is_damage() -> None:
    stream = io.BytesIO()
    soundfile.write(stream, np.array([0.1, np.nan, 0.2]), 8000, format="WAV", subtype="FLOAT")
    with pytest.raises(ValueError, match="NaN or infinite"):
        decode_audio(MediaFile(stream))


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> MediaFile:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return MediaFile(stream)


STROKE = np.zeros((8, 8), np.uint8)
STROKE[2:6, 3:5] = 255  # opaque; all colours are black, hidden ones, too
SHEET = np.stack([np.zeros_like(STROKE)] * 3 + [STROKE], axis=-1)


def palette() -> Image.Image:
    sheet = Image.fromarray(STROKE // 255).convert("P")
    sheet.putpalette([0, 0, 0] * 2)
    return sheet


@pytest.mark.parametrize(
    "file",
    [
        saved(Image.fromarray(SHEET)),
        saved(Image.fromarray(SHEET[..., 2:])),
        saved(palette(), transparency=0),
        saved(palette(), "GIF", transparency=0),
        saved(Image.fromarray(SHEET), "WEBP", lossless=True, exact=True),
        saved(Image.fromarray(SHEET), "TIFF"),
        saved(Image.fromarray(SHEET[..., :3] + (255 - STROKE[..., None])), transparency=(255, 255, 255)),
    ],
    ids=["RGBA", "LA", "palette", "GIF", "WebP", "TIFF", "colour"],
)
def test_what_is_transparent_is_a_white_page(file: MediaFile) -> None:
    np.testing.assert_array_equal(np.asarray(decode_image(file)), 255 - STROKE[..., None].repeat(3, axis=-1))


@pytest.mark.parametrize("kind", ["WEBP", "PNG", "GIF"])
def test_frames_of_an_animation_are_on_white_too(kind: str) -> None:
    frames = [Image.fromarray(np.roll(SHEET, index, axis=1)) for index in range(3)]
    options = {"lossless": True, "exact": True} if kind == "WEBP" else {"disposal": 2}
    clip = decode_clip(saved(frames[0], kind, save_all=True, append_images=frames[1:], duration=100, **options), 3)
    for index, frame in enumerate(clip.frames):
        np.testing.assert_array_equal(np.asarray(frame)[..., 0], 255 - np.roll(STROKE, index, axis=1))


@pytest.mark.parametrize("room", [0, clips._KEPT_BYTES])
@pytest.mark.parametrize("kind", ["WEBP", "PNG", "GIF"])
def test_frames_of_an_animation_are_evenly_spaced_in_time(
    kind: str, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clips, "_KEPT_BYTES", room)
    frames = [Image.new("RGB", (16, 16), (12 * index, 0, 0)) for index in range(21)]
    durations = [100] * 11 + [1000] * 10  # 1.1 s at 10 fps, then 1 fps
    options = {"lossless": True} if kind == "WEBP" else {}
    file = saved(frames[0], kind, save_all=True, append_images=frames[1:], duration=durations, **options)
    clip = decode_clip(file, 6)
    assert clip.times == pytest.approx([0, 2.1, 4.1, 6.1, 8.1, 10.1])
    assert [round(np.asarray(frame)[0, 0, 0] / 12) for frame in clip.frames] == [0, 12, 14, 16, 18, 20]


@pytest.mark.parametrize(
    ("pixels", "kind", "shown"),
    [
        (np.array([[0, 0.5, 1]], np.float32), "TIFF", [0, 128, 255]),
        (np.array([[0, 100, 255]], np.float32), "TIFF", [0, 100, 255]),
        (np.array([[0, 100, 255]], np.int32), "TIFF", [0, 100, 255]),
        (np.array([[0, 50_000, 65_535]], np.int32), "TIFF", [0, 195, 255]),
        (np.array([[0, 50_000, 100_000]], np.int32), "TIFF", [0, 128, 255]),
        (np.array([[0, 2048, 4095]], np.uint16), "TIFF", [0, 128, 255]),
        (np.array([[0, 25_700, 65_535]], np.uint16), "TIFF", [0, 100, 255]),
        (np.array([[0, 2570, 4112]], np.uint16), "PNG", [0, 10, 16]),
    ],
    ids=["unit", "bytes as floats", "bytes", "16 bits", "more", "12 bits", "16", "PNG"],
)
def test_pixels_that_are_no_bytes_are_scaled(pixels: np.ndarray, kind: str, shown: list[int]) -> None:
    np.testing.assert_allclose(np.asarray(decode_image(saved(Image.fromarray(pixels), kind)))[0, :, 0], shown, atol=0.5)


@pytest.mark.parametrize("pixels", [[[-1.0, 1.0]], [[0.0, np.nan]], [[0.0, np.inf]]])
def test_pixels_that_are_no_colours_are_damage(pixels: list[list[float]]) -> None:
    with pytest.raises(ValueError, match=r"its pixels are from .* to .*; expected numbers from 0"):
        decode_image(saved(Image.fromarray(np.array(pixels, np.float32)), "TIFF"))


def test_sixteen_bit_images_are_scaled_not_clipped() -> None:
    stream = io.BytesIO()
    Image.fromarray(np.array([[0, 257 * 100, 65535]], dtype=np.uint16)).save(stream, format="PNG")
    assert [pixel[0] for pixel in np.asarray(decode_image(MediaFile(stream)))[0]] == [0, 100, 255]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_photo_taken_sideways_is_upright(kind: str) -> None:
    exif, stream = Image.Exif(), io.BytesIO()
    exif[ExifTags.Base.Orientation] = 6
    pixels = np.zeros((16, 32, 3), dtype=np.uint8)
    pixels[:, 16:] = 255
    Image.fromarray(pixels).save(stream, kind, exif=exif)
    image = decode_image(MediaFile(stream))
    assert image.size == (16, 32)
    assert np.asarray(image)[4:12].max() < 30 and np.asarray(image)[20:28].min() > 225


def test_channels_are_averaged() -> None:
    stream = io.BytesIO()
    soundfile.write(stream, np.array([[0.5, 0.0]] * 10), 8000, format="WAV", subtype="FLOAT")
    np.testing.assert_allclose(decode_audio(MediaFile(stream)).samples, 0.25)


@pytest.mark.parametrize("rate", [4000, 16000, 22050])
def test_resampling_keeps_a_tone(rate: int) -> None:
    tone = Waveform(np.sin(2 * np.pi * 440 * np.arange(8000) / 8000).astype(np.float32), 8000)
    expected = np.sin(2 * np.pi * 440 * np.arange(rate) / rate)
    np.testing.assert_allclose(tone.resampled(rate).samples, expected, atol=1e-5)


def test_own_rate_is_untouched() -> None:
    sound = decode_audio(MediaFile.of(wav(0)))
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


class CountingFile(io.BufferedReader):
    """A file that counts the bytes that are read of it."""

    num_read = 0

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self.num_read += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer)
        self.num_read += count
        return count


@pytest.fixture(scope="module")
def long_sounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five minutes of noise."""
    folder, noise = tmp_path_factory.mktemp("sound"), np.random.default_rng(0)
    for kind, subtype in (("WAV", "FLOAT"), ("FLAC", "PCM_24"), ("OGG", "VORBIS"), ("MP3", "MPEG_LAYER_III")):
        with soundfile.SoundFile(folder / f"long.{kind.lower()}", "w", 8000, 1, subtype, format=kind) as file:
            for _ in range(30):  # libsndfile crashes if all are written to Ogg at once
                file.write(noise.normal(0, 0.1, 80_000))
    return folder


@pytest.mark.parametrize("kind", ["wav", "flac", "ogg", "mp3"])
def test_of_a_part_of_a_long_sound_only_the_part_is_read(long_sounds: Path, kind: str) -> None:
    path = long_sounds / f"long.{kind}"
    with CountingFile(open(path, "rb", buffering=0)) as stream:
        part = decode_audio(MediaFile(stream, 200.5, 204.0)).samples
    assert len(part) == 3.5 * 8000
    whole = decode_audio(MediaFile.of(path.read_bytes())).samples
    np.testing.assert_allclose(part, whole[1_604_000:1_632_000], atol=2e-3 if kind == "mp3" else 1e-6)
    if kind != "mp3":  # of which the length must be counted
        assert stream.num_read < path.stat().st_size / 5


def test_a_part_ends_with_the_file_and_begins_in_it() -> None:
    assert len(decode_audio(MediaFile(io.BytesIO(wav(0)), 0.05, 100.0)).samples) == len(
        decode_audio(MediaFile.of(wav(0))).samples
    ) - round(0.05 * 8000)
    with pytest.raises(ValueError, match="audio without samples after 50 s"):
        decode_audio(MediaFile(io.BytesIO(wav(0)), 50.0))


def sound_row(file: Any) -> Row:
    return Row("a", "sounds", [], {"audio": [file], "image": [], "video": [file]}, {})


def test_a_row_names_the_part_of_its_sound(tmp_path: Path) -> None:
    samples = np.arange(8000) / 8000
    soundfile.write(tmp_path / "a.wav", samples, 8000, subtype="FLOAT")
    data = (tmp_path / "a.wav").read_bytes()
    for file in ({"path": str(tmp_path / "a.wav")}, {"bytes": data}, {"bytes": data, "path": "a.wav"}):
        with sound_row(file | {"start": 0.25, "stop": 0.5}).open_media("audio", 0) as part:
            np.testing.assert_allclose(decode_audio(part).samples, samples[2000:4000], atol=1e-6)
        with sound_row(file | {"start": None, "stop": None}).open_media("audio", 0) as whole:
            assert len(decode_audio(whole).samples) == 8000


@pytest.mark.parametrize(("start", "stop"), [(2, 1), (-1, None), (0, 0), ("1", None), (None, True), (0, float("nan"))])
def test_a_part_that_is_none_is_an_error(start: Any, stop: Any) -> None:
    file = {"path": "a.wav", "start": start, "stop": stop}
    with pytest.raises(ValueError, match="expected seconds, start before stop"), sound_row(file).open_media("audio", 0):
        pass


@pytest.mark.parametrize(
    ("file", "modality", "message"),
    [
        ({"start": 1.0}, "image", "image 1 has 'start', which only audio or video may have"),
        ({"fps": 1.0}, "audio", "audio 1 has 'fps', which only video may have"),
        ({"fps": 1.0, "nframes": 4}, "video", "video 1 has '(nframes|fps)' and '(fps|nframes)', which say the same"),
        ({"start": 1, "video_start": 1}, "video", "video 1 has 'start' and 'video_start', which say the same"),
        ({"max_pixels": 0}, "image", "image 1 has max_pixels 0; expected a whole number above 0"),
        ({"nframes": 2.5}, "video", "video 1 has nframes 2.5; expected a whole number above 0"),
    ],
)
def test_keys_that_a_medium_cannot_have_are_named(file: dict[str, Any], modality: str, message: str) -> None:
    row = Row("a", "s", [], {modality: [{"path": "a"} | file]}, {})
    with pytest.raises(ValueError, match=message), row.open_media(modality, 0):
        pass


def film(seconds: int) -> MediaFile:
    """A video (AV1) with a frame every two seconds. The picture changes every six frames: the encoder begins anew."""
    random = np.random.default_rng(0)
    scenes = [random.integers(0, 255, (32, 32, 3), dtype=np.uint8) for _ in range(seconds // 12 + 1)]
    frames = [Image.fromarray(np.roll(scenes[index // 6], index, axis=1)) for index in range(seconds // 2)]
    stream = io.BytesIO()
    frames[0].save(stream, "AVIF", save_all=True, append_images=frames[1:], duration=2000, speed=6, quality=40)
    return MediaFile(stream)


def test_ten_minutes_of_video_are_decoded_at_as_many_frames_as_half_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frames are those of a decoder that begins at the first one."""
    files, sought = {length: film(length) for length in (30, 600)}, {}
    seek = AvifImagePlugin.AvifImageFile.seek
    for length, file in files.items():
        frames: list[int] = []
        monkeypatch.setattr(AvifImagePlugin.AvifImageFile, "seek", lambda *args: frames.append(args[1]) or seek(*args))  # noqa: B023
        clip = decode_clip(file, max_frames=4)
        assert len(clip.frames) == 4 and clip.rate == pytest.approx(3 / (length - 2))
        sought[length] = frames
    assert sought == {30: [0, 14, 0, 5, 9], 600: [0, 299, 0, 100, 199]}  # the first 0: Pillow opens the file
    monkeypatch.undo()
    every = [frame.convert("RGB").tobytes() for frame in ImageSequence.Iterator(Image.open(files[600].begun()))]
    assert [frame.tobytes() for frame in clip.frames] == [every[index] for index in (0, 100, 199, 299)]


def test_a_part_whose_frames_begin_together_is_its_first_frame() -> None:
    frames = [Image.new("L", (8, 8), shade) for shade in (0, 80, 160)]
    stream = io.BytesIO()
    frames[0].save(stream, "PNG", save_all=True, append_images=frames[1:], duration=[0, 100, 100])
    clip = decode_clip(MediaFile(stream, 0.0, 0.05), 9)
    assert (clip.times, clip.found, len(clip.frames)) == ((0.0,), 2, 1)
    with pytest.raises(ValueError, match=r"no frame of the video begins from 5 s on; the last one begins at 0\.1 s"):
        decode_clip(MediaFile(stream, 5.0), 9)

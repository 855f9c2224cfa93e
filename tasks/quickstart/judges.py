"""Judges of the media that a quickstart model writes: they recognize the digit in an image, a clip or a film.

    image_judge, speech_judge = load_judges("tasks/quickstart/data/train.parquet")
    image_judge.predict([image])        # ["7"]
    speech_judge.predict([waveform])    # ["7"]
    VideoJudge().fit(*media_of("tasks/quickstart/data/train.parquet", "video")).predict([frames])  # ["7 left"]

All are support vector machines, fitted only on the real training media, never on generated media.
"""

import io
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import soundfile
from PIL import Image, ImageSequence
from scipy.fft import dct
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from transformers.audio_utils import mel_filter_bank

SAMPLING_RATE = 8000
IMAGE_SIZE = 8
FRAME_SIZE = 12
WINDOW = 256  # samples: 32 ms
HOP = 80  # samples: 10 ms
NUM_MELS = 32
NUM_CEPSTRA = 13
NUM_FRAMES = 16
FLOOR_DB = -50.0  # relative to the clip's loudest mel value; quieter values carry no information about the digit
SPEECH_DB = -30.0  # relative to the loudest frame; the word spans from the first to the last louder frame


class ImageJudge:
    """Recognizes the digit in an image."""

    def __init__(self) -> None:
        self._classifier = SVC(gamma=0.001, C=10)

    def fit(self, images: Sequence[Image.Image], labels: Sequence[str]) -> "ImageJudge":
        """Fit on images of any mode and size."""
        self._classifier.fit(_grey_levels(images), labels)
        return self

    def predict(self, images: Sequence[Image.Image]) -> list[str]:
        """Return a fitted label for each image; images may have any mode and size."""
        return self._classifier.predict(_grey_levels(images)).tolist() if len(images) else []


class SpeechJudge:
    """Recognizes the digit in a clip."""

    def __init__(self) -> None:
        self._classifier = make_pipeline(StandardScaler(), SVC(C=10))

    def fit(self, waveforms: Sequence[np.ndarray], labels: Sequence[str]) -> "SpeechJudge":
        """Fit on floats [samples] at SAMPLING_RATE."""
        self._classifier.fit(_cepstra_of_all(waveforms), labels)
        return self

    def predict(self, waveforms: Sequence[np.ndarray]) -> list[str]:
        """Return a fitted label for each clip: floats [samples] at SAMPLING_RATE, of any length and loudness."""
        return self._classifier.predict(_cepstra_of_all(waveforms)).tolist() if len(waveforms) else []


class VideoJudge:
    """Recognizes the digit and the direction in a film."""

    def __init__(self) -> None:
        self._classifier = SVC(gamma=0.0003, C=10)

    def fit(self, films: Sequence[Sequence[Image.Image]], labels: Sequence[str]) -> "VideoJudge":
        """Fit on films of four frames of any mode and size."""
        self._classifier.fit(_grey_films(films), labels)
        return self

    def predict(self, films: Sequence[Sequence[Image.Image]]) -> list[str]:
        """Return a fitted label, such as "7 left", for each film of four frames."""
        return self._classifier.predict(_grey_films(films)).tolist() if len(films) else []


def load_judges(train_parquet: str | Path) -> tuple[ImageJudge, SpeechJudge]:
    """Return both judges, fitted on the media of `train_parquet`; takes a few seconds."""
    return (
        ImageJudge().fit(*media_of(train_parquet, "image")),
        SpeechJudge().fit(*media_of(train_parquet, "speech")),
    )


def media_of(parquet: str | Path, kind: str) -> tuple[list, list[str]]:
    """Return the distinct media with a known digit, and their labels.

    `kind` is "image" (PIL images, from the image_to_text rows), "speech" (float32 [samples] at SAMPLING_RATE, from
    the speech_to_text rows) or "video" (lists of PIL images, from the video_to_text rows). Raises ValueError for any
    other kind, or if the file has no such rows.
    """
    if kind not in _KINDS:
        raise ValueError(f'kind is "image", "speech" or "video", not {kind!r}.')
    column, decode = _KINDS[kind]
    task = f"{kind}_to_text"
    table = pq.read_table(parquet, columns=[column, "label"], filters=[("task", "==", task)])
    label_of = {row[column][0]["bytes"]: row["label"] for row in table.to_pylist()}
    if not label_of:
        raise ValueError(f"{parquet} has no rows of task {task}.")
    return [decode(data) for data in label_of], list(label_of.values())


def _decode_image(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    image.load()
    return image


def _decode_speech(data: bytes) -> np.ndarray:
    waveform, rate = soundfile.read(io.BytesIO(data), dtype="float32")
    assert rate == SAMPLING_RATE and waveform.ndim == 1, (rate, waveform.shape)
    return waveform


def _decode_film(data: bytes) -> list[Image.Image]:
    return [frame.copy() for frame in ImageSequence.Iterator(Image.open(io.BytesIO(data)))]


_KINDS = {"image": ("images", _decode_image), "speech": ("audios", _decode_speech), "video": ("videos", _decode_film)}


def _grey_films(films: Sequence[Sequence[Image.Image]]) -> np.ndarray:
    """Return float64 [num_films, 4 * 144] in 0..16."""
    return np.stack([_grey_levels(film, FRAME_SIZE).ravel() for film in films])


def _grey_levels(images: Sequence[Image.Image], side: int = IMAGE_SIZE) -> np.ndarray:
    """Return float64 [num_images, side * side] in 0..16, the scale of UCI optdigits."""
    size = (side, side)
    greys = [image.convert("L").resize(size, Image.Resampling.BOX) for image in images]
    return np.stack([np.asarray(grey, np.float64).ravel() for grey in greys]) * (16 / 255)


def _cepstra_of_all(waveforms: Sequence[np.ndarray]) -> np.ndarray:
    return np.stack([_cepstra(np.asarray(waveform, np.float64)) for waveform in waveforms])


def _cepstra(waveform: np.ndarray) -> np.ndarray:
    """float64 [samples] -> float64 [NUM_FRAMES * NUM_CEPSTRA]: mel cepstra of the word, stretched to NUM_FRAMES."""
    mel_db = _trim(_mel_db(waveform))
    cepstra = dct(mel_db, axis=1, norm="ortho")[:, 1 : NUM_CEPSTRA + 1]
    position = np.linspace(0, len(cepstra) - 1, NUM_FRAMES)
    columns = [np.interp(position, np.arange(len(cepstra)), coefficient) for coefficient in cepstra.T]
    return np.concatenate(columns)


def _mel_db(waveform: np.ndarray) -> np.ndarray:
    """float64 [samples] -> float64 [num_frames, NUM_MELS], FLOOR_DB..0 dB relative to the loudest value."""
    padded = np.pad(waveform, (WINDOW // 2, WINDOW))
    frames = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP]
    power = np.abs(np.fft.rfft(frames * np.hanning(WINDOW))) ** 2 @ _mel_filters()
    return np.maximum(10 * np.log10(power / max(power.max(), 1e-10) + 1e-10), FLOOR_DB)


def _trim(mel_db: np.ndarray) -> np.ndarray:
    """Cut the frames before the first and after the last frame that is louder than SPEECH_DB."""
    loudness = mel_db.max(axis=1)
    loud = np.flatnonzero(loudness >= loudness.max() + SPEECH_DB)
    return mel_db[loud[0] : loud[-1] + 1]


@lru_cache(maxsize=1)
def _mel_filters() -> np.ndarray:
    """float64 [WINDOW // 2 + 1, NUM_MELS], triangular, 100 Hz up to half the sampling rate."""
    half = SAMPLING_RATE / 2
    return mel_filter_bank(WINDOW // 2 + 1, NUM_MELS, 100.0, half, SAMPLING_RATE, norm=None, mel_scale="htk")

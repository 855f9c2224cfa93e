"""Make the quickstart's data: `data/train.parquet` and `data/heldout.parquet`, next to this file.

    python tasks/quickstart/make_data.py            # needs espeak-ng on the PATH; about half a minute

The media are small enough to commit: 8x8 digit images (UCI optdigits, from scikit-learn), digits spoken by espeak-ng,
and the images moving over a 12x12 canvas. They form eight tasks, with one row per example:

    id        "train/image_to_text/00017"
    task      "image_to_text"
    label     the correct answer: "7", "7 left", "3 5"
    messages  role and content; the last message is the assistant's and is the target
    images, audios, videos   encoded files; the n-th image part of the messages is images[n], and so on

The held-out split shares no image and no voice with training. A second run writes the same bytes.
"""

import argparse
import io
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import soundfile
from datasets import Audio, Features, Image, List, Value, Video
from PIL import Image as PILImage
from scipy.signal import resample_poly
from sklearn.datasets import load_digits

SEED = 20250101
FOLDER = Path(__file__).parent / "data"
DIGITS = tuple("0123456789")
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

HELDOUT_IMAGES_PER_DIGIT = 40
ROWS = {"train": 1500, "heldout": 200}
VIDEO_ROWS = {"train": 3000, "heldout": 200}

SAMPLING_RATE = 8000
MAX_SECONDS = 0.9
CLIPS_PER_VOICE_AND_DIGIT = 2
ACCENTS = (
    "en-us",
    "en-gb",
    "en-gb-scotland",
    "en-029",
    "en-gb-x-rp",
    "en-gb-x-gbclan",
    "en-gb-x-gbcwmd",
    "en-us-nyc",
)
# espeak-ng calls its voices variants. Excluded: whispers, croaks, robots, Klatt synthesis, and voices whose digits a
# classifier trained on the other voices misreads.
HELDOUT_VOICES = ("f1", "f4", "linda", "m3", "m7", "Mike", "quincy", "victor", "Michael", "Hugo")
TRAIN_VOICES = (
    "f2", "f3", "f5", "m1", "m2", "m4", "m5", "m6", "m8", "Alex", "Andrea", "Andy", "Annie", "Denis", "Diogo", "Gene",
    "Jacky", "Mario", "Mr serious", "Nguyen", "Storm", "anika", "antonio", "aunty", "belinda", "boris", "ed", "gustave",
    "iven", "iven3", "iven4", "john", "marcelo", "max", "michel", "miguel", "pablo", "paul", "pedro", "rob", "robert",
    "sandro", "steph", "steph2",
)  # fmt: skip
VOICES = {"train": TRAIN_VOICES, "heldout": HELDOUT_VOICES}

CANVAS = 12
TRAVEL = (0, 1, 3, 4)  # offset of the digit in each of the four frames, in pixels
STEPS = {"right": (1, 0), "left": (-1, 0), "down": (0, 1), "up": (0, -1)}  # x to the right, y downwards
VIDEO_LABELS = tuple(f"{digit} {direction}" for direction in STEPS for digit in DIGITS)

PROMPTS = {
    "image_to_text": ("read the digit", "which digit is this?", "what digit?", "name this digit"),
    "speech_to_text": ("which digit was said?", "write what you hear", "what was said?", "name the spoken digit"),
    "video_to_text": (
        "which digit moves where?",
        "digit and direction?",
        "what moves where?",
        "name digit and direction",
    ),
    "images_to_text": ("read these digits", "which digits are these?", "what digits?", "name the digits in order"),
    "text_to_image": ("draw a {}", "draw the digit {}", "paint a {}", "show me a {}"),
    "text_to_speech": ("say {}", "say the digit {}", "speak the digit {}", "read {} aloud"),
    "speech_to_image": ("draw this digit", "draw what you hear", "paint the spoken digit", "show what was said"),
    "image_to_speech": ("say this digit", "read it aloud", "speak the digit", "say what you see"),
}

FEATURES = Features(
    {
        "id": Value("string"),
        "task": Value("string"),
        "label": Value("string"),
        "messages": List(
            {"role": Value("string"), "content": List({"type": Value("string"), "text": Value("string")})}
        ),
        "images": List(Image(decode=False)),
        "audios": List(Audio(decode=False)),
        "videos": List(Video(decode=False)),
    }
)


@dataclass(frozen=True)
class Medium:
    """An encoded file and its label: "7", or "7 left" for a video."""

    kind: str  # "image", "audio" or "video"
    label: str
    path: str
    data: bytes


Part = str | Medium


@dataclass(frozen=True)
class Example:
    """A question to the model and the answer to learn; `label` is the answer in words."""

    label: str
    question: list[Part]
    answer: list[Part]


class Deck:
    """Deals media of a given label: all of them in random order, then all of them again in a new order."""

    def __init__(self, media: Iterable[Medium], rng: np.random.Generator):
        self._media = defaultdict(list)
        for medium in media:
            self._media[medium.label].append(medium)
        self._piles: dict[str, list[Medium]] = defaultdict(list)
        self._rng = rng

    def deal(self, label: str) -> Medium:
        """Return the next medium of `label`."""
        if not self._piles[label]:
            order = self._rng.permutation(len(self._media[label]))
            self._piles[label] = [self._media[label][i] for i in order]
        return self._piles[label].pop()


# ---------------------------------------------------------------------------------------------------------- images


def png(grey: np.ndarray) -> bytes:
    """Encode uint8 [height, width] as a lossless PNG of mode "L"."""
    file = io.BytesIO()
    PILImage.fromarray(grey).save(file, "PNG", optimize=True)
    return file.getvalue()


def split_images(rng: np.random.Generator) -> dict[str, list[Medium]]:
    """Return the 8x8 images of each split, without duplicates of equal pixels."""
    digits = load_digits()
    greys = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    _, first = np.unique(greys.reshape(len(greys), -1), axis=0, return_index=True)
    splits: dict[str, list[Medium]] = {"train": [], "heldout": []}
    for digit in DIGITS:
        members = [i for i in sorted(first) if digits.target[i] == int(digit)]
        for rank, i in enumerate(rng.permutation(members)):
            split = "heldout" if rank < HELDOUT_IMAGES_PER_DIGIT else "train"
            splits[split].append(Medium("image", digit, f"optdigits/{i:04d}.png", png(greys[i])))
    return splits


# ---------------------------------------------------------------------------------------------------------- speech


def speak(word: str, voice: str, words_per_minute: int, pitch: int) -> np.ndarray:
    """Speak `word` with espeak-ng: float64 [samples] at SAMPLING_RATE. `pitch` is 0..99; 50 is the voice's default."""
    command = ["espeak-ng", "-v", voice, "-s", str(words_per_minute), "-p", str(pitch), "--stdout", word]
    wav = subprocess.run(command, capture_output=True, check=True).stdout
    waveform, rate = soundfile.read(io.BytesIO(wav), dtype="float64")
    return resample_poly(waveform, SAMPLING_RATE, rate)


def trim_silence(waveform: np.ndarray, threshold: float = 0.01) -> np.ndarray:
    """Cut both ends below `threshold` of the peak, but leave 10 ms before and 30 ms after the word."""
    loud = np.flatnonzero(np.abs(waveform) > threshold * np.abs(waveform).max())
    before, after = SAMPLING_RATE // 100, SAMPLING_RATE * 3 // 100
    return waveform[max(0, loud[0] - before) : loud[-1] + after]


def flac(waveform: np.ndarray) -> bytes:
    """Encode float64 [samples] as 16 bit FLAC with the peak at 0.9.

    Samples are multiples of 32: FLAC stores the five zero bits for free, which saves two fifths of the file.
    """
    samples = np.rint(waveform * (0.9 * 1024 / np.abs(waveform).max())).astype(np.int16) * np.int16(32)
    file = io.BytesIO()
    soundfile.write(file, samples, SAMPLING_RATE, format="FLAC", subtype="PCM_16", compression_level=1.0)
    return file.getvalue()


def clip(voice: str, digit: str, take: int, rng: np.random.Generator) -> Medium:
    """Return one spoken digit with a random accent, speed and pitch."""
    accent = ACCENTS[rng.integers(len(ACCENTS))]
    waveform = speak(WORDS[int(digit)], f"{accent}+{voice}", int(rng.integers(145, 191)), int(rng.integers(35, 66)))
    waveform = trim_silence(waveform)
    assert len(waveform) <= MAX_SECONDS * SAMPLING_RATE, (voice, digit, len(waveform))
    return Medium("audio", digit, f"espeak/{voice}/{digit}_{accent}_{take}.flac", flac(waveform))


def split_speech(rng: np.random.Generator) -> dict[str, list[Medium]]:
    """Return the clips of each split: every voice says every digit CLIPS_PER_VOICE_AND_DIGIT times.

    Raises ValueError if espeak-ng is not installed or lacks one of the voices.
    """
    check_espeak()
    takes = range(CLIPS_PER_VOICE_AND_DIGIT)
    return {
        split: [clip(voice, digit, take, rng) for voice in voices for digit in DIGITS for take in takes]
        for split, voices in VOICES.items()
    }


def check_espeak() -> None:
    """Raise ValueError if espeak-ng is not installed or lacks one of VOICES."""
    if shutil.which("espeak-ng") is None:
        raise ValueError(
            "espeak-ng makes the spoken digits, but it is not on the PATH. Install it (Debian, Ubuntu: "
            "apt-get install espeak-ng; macOS: brew install espeak-ng), or use the committed parquet files as they are."
        )
    listing = subprocess.run(["espeak-ng", "--voices=variant"], capture_output=True, text=True, check=True).stdout
    missing = [voice for voices in VOICES.values() for voice in voices if f"!v/{voice} " not in listing]
    if missing:
        raise ValueError(
            f"This espeak-ng lacks the voices {missing} (it would silently use its default voice instead)."
        )


# ---------------------------------------------------------------------------------------------------------- videos


def frames(grey: np.ndarray, direction: str, offset: int) -> list[np.ndarray]:
    """Return four uint8 [12, 12] of uint8 [8, 8]: it moves 4 pixels along `direction`, `offset` from the side."""
    step_x, step_y = STEPS[direction]
    canvases = []
    for travelled in TRAVEL:
        x = travelled if step_x > 0 else TRAVEL[-1] - travelled if step_x < 0 else offset
        y = travelled if step_y > 0 else TRAVEL[-1] - travelled if step_y < 0 else offset
        canvas = np.zeros((CANVAS, CANVAS), np.uint8)
        canvas[y : y + 8, x : x + 8] = grey
        canvases.append(canvas)
    return canvases


def apng(canvases: Sequence[np.ndarray]) -> bytes:
    """Encode uint8 [height, width] frames as a lossless animated PNG of mode "L", four frames per second."""
    first, *others = [PILImage.fromarray(canvas) for canvas in canvases]
    file = io.BytesIO()
    first.save(file, "PNG", save_all=True, append_images=others, duration=250, optimize=True)
    return file.getvalue()


def make_videos(images: Iterable[Medium], rng: np.random.Generator) -> list[Medium]:
    """Return a video for every image and direction, each at a random offset."""
    videos = []
    for image in images:
        grey = np.asarray(PILImage.open(io.BytesIO(image.data)))
        for direction in STEPS:
            canvases = frames(grey, direction, int(rng.integers(TRAVEL[-1] + 1)))
            path = f"{Path(image.path).with_suffix('')}_{direction}.png"
            videos.append(Medium("video", f"{image.label} {direction}", path, apng(canvases)))
    return videos


# ----------------------------------------------------------------------------------------------------------- tasks


@dataclass(frozen=True)
class Source:
    """Inputs of a task: a deck per kind of media, and a random generator."""

    images: Deck
    speech: Deck
    videos: Deck
    rng: np.random.Generator


def image_to_text(source: Source, index: int, prompt: str) -> Example:
    """An image -> "7"."""
    digit = DIGITS[index % 10]
    return Example(digit, [source.images.deal(digit), prompt], [digit])


def speech_to_text(source: Source, index: int, prompt: str) -> Example:
    """A clip -> "7"."""
    digit = DIGITS[index % 10]
    return Example(digit, [source.speech.deal(digit), prompt], [digit])


def video_to_text(source: Source, index: int, prompt: str) -> Example:
    """A video -> "7 left"."""
    label = VIDEO_LABELS[index % len(VIDEO_LABELS)]
    return Example(label, [source.videos.deal(label), prompt], [label])


def images_to_text(source: Source, index: int, prompt: str) -> Example:
    """Two or three images -> "3 5"."""
    others = source.rng.integers(10, size=source.rng.integers(1, 3))
    digits = [DIGITS[index % 10], *(DIGITS[i] for i in others)]
    return Example(" ".join(digits), [*map(source.images.deal, digits), prompt], [" ".join(digits)])


def text_to_image(source: Source, index: int, prompt: str) -> Example:
    """Text, "draw a 7" -> an image."""
    digit = DIGITS[index % 10]
    return Example(digit, [prompt.format(digit)], [source.images.deal(digit)])


def text_to_speech(source: Source, index: int, prompt: str) -> Example:
    """Text, "say 7" -> a clip."""
    digit = DIGITS[index % 10]
    return Example(digit, [prompt.format(digit)], [source.speech.deal(digit)])


def speech_to_image(source: Source, index: int, prompt: str) -> Example:
    """A clip -> an image of its digit."""
    digit = DIGITS[index % 10]
    return Example(digit, [source.speech.deal(digit), prompt], [source.images.deal(digit)])


def image_to_speech(source: Source, index: int, prompt: str) -> Example:
    """An image -> a clip of its digit."""
    digit = DIGITS[index % 10]
    return Example(digit, [source.images.deal(digit), prompt], [source.speech.deal(digit)])


TASKS: tuple[Callable[[Source, int, str], Example], ...] = (
    image_to_text,
    speech_to_text,
    video_to_text,
    images_to_text,
    text_to_image,
    text_to_speech,
    speech_to_image,
    image_to_speech,
)


# ------------------------------------------------------------------------------------------------------------ rows


def message(role: str, parts: Sequence[Part]) -> dict:
    """Return parts as an OpenAI message: content [{"type": "image", "text": None}, {"type": "text", "text": "7"}]."""
    content = [
        {"type": part.kind, "text": None} if isinstance(part, Medium) else {"type": "text", "text": part}
        for part in parts
    ]
    return {"role": role, "content": content}


def row(identity: str, task: str, example: Example) -> dict:
    """Return the example as a dict of FEATURES."""
    media = [part for part in (*example.question, *example.answer) if isinstance(part, Medium)]

    def files(kind: str) -> list[dict]:
        return [{"bytes": medium.data, "path": medium.path} for medium in media if medium.kind == kind]

    return {
        "id": identity,
        "task": task,
        "label": example.label,
        "messages": [message("user", example.question), message("assistant", example.answer)],
        "images": files("image"),
        "audios": files("audio"),
        "videos": files("video"),
    }


def make_rows(split: str, images: list[Medium], speech: list[Medium], videos: list[Medium]) -> Iterator[dict]:
    """The split's rows, task after task, digits (and directions) in turn."""
    for number, task in enumerate(TASKS):
        name = task.__name__
        rng = np.random.default_rng([SEED, number, split == "heldout"])
        source = Source(Deck(images, rng), Deck(speech, rng), Deck(videos, rng), rng)
        for index in range((VIDEO_ROWS if task is video_to_text else ROWS)[split]):
            prompt = PROMPTS[name][rng.integers(len(PROMPTS[name]))]
            yield row(f"{split}/{name}/{index:05d}", name, task(source, index, prompt))


def write_parquet(rows: list[dict], path: Path) -> None:
    """One row group whose dictionaries hold every file once, however many rows use it."""
    table = pa.Table.from_pylist(rows, schema=FEATURES.arrow_schema)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(
        table,
        path,
        row_group_size=len(rows),
        use_dictionary=True,
        dictionary_pagesize_limit=2**30,
        compression="zstd",
        compression_level=19,
    )


def main() -> None:
    """Writes both splits and prints their sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the two parquet files go")
    folder = parser.parse_args().folder
    rng = np.random.default_rng(SEED)
    images, speech = split_images(rng), split_speech(rng)
    for split in ROWS:
        rows = list(make_rows(split, images[split], speech[split], make_videos(images[split], rng)))
        path = folder / f"{split}.parquet"
        write_parquet(rows, path)
        print(
            f"{path}: {len(rows)} rows, {len(images[split])} images, {len(speech[split])} clips, "
            f"{path.stat().st_size / 1e6:.2f} MB"
        )


if __name__ == "__main__":
    main()

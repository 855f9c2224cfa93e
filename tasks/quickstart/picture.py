"""One picture of a quickstart run: what its model answers before training and after it.

    python tasks/quickstart/picture.py runs/quickstart runs/quickstart/picture.png

A row is one of the first held-out questions of a task. The model before training has the weights from which the run
began; its answers are generated here, and saved as the samples of step 0.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import soundfile
from judges import load_judges
from PIL import Image, ImageDraw, ImageFont

import omnitrain as ot
from omnitrain.train.evaluate.media_files import save_samples

HERE = Path(__file__).parent
TASKS = {  # source of the held-out rows -> what the model does
    "image_to_text": "reads an image",
    "speech_to_text": "hears a clip",
    "video_to_text": "watches a film",
    "text_to_image": "draws",
    "text_to_speech": "speaks",
    "speech_to_image": "draws what it hears",
}
COLUMNS = (16, 190, 550, 770)  # left edges of task, question, answer before, answer after
WIDTH, ROW, TOP, MEDIA = 960, 84, 40, 64
INK, GREY, PAPER = "#1c1c1c", "#6b6b6b", "#ffffff"
SUFFIXES = (".wav", ".flac", ".ogg")
SAVED = 4  # samples of each task, one of which is shown


def main(run: Path, picture: Path) -> None:
    """Generate the answers of step 0, then draw both columns."""
    before, after = samples(untrained(run)), samples(run / "samples")
    judges = load_judges(HERE / "data" / "train.parquet")
    image = Image.new("RGB", (WIDTH, TOP + ROW * len(TASKS)), PAPER)
    draw = ImageDraw.Draw(image)
    heads = ("task", "question", "before training", f"after {after['step']:,} steps")
    for left, head in zip(COLUMNS, heads, strict=True):
        draw.text((left, 12), head, GREY, font(15))
    for number, (source, task) in enumerate(TASKS.items()):
        top = TOP + ROW * number
        draw.line((COLUMNS[0], top, WIDTH - COLUMNS[0], top), "#dddddd")
        draw.text((COLUMNS[0], top + 30), task, INK, font(16))
        asked, said = (of[source][number % len(of[source])] for of in (after, before))
        show(image, (COLUMNS[1], top), asked["prompt"], after["folder"])
        show(image, (COLUMNS[2], top), said["answer"], before["folder"], judges)
        show(image, (COLUMNS[3], top), asked["answer"], after["folder"], judges)
    image.save(picture)
    print(f"picture: {picture}")


def untrained(run: Path) -> Path:
    """Answer the first held-out questions of each task with the run's initial weights; return the folder of samples."""
    folder = run / "samples" / "step-00000000"
    if not (folder / "samples.json").is_file():
        overrides = [f"evaluation.examples_per_source={SAVED}", f"output_dir={run / 'untrained'}"]
        trainer = ot.Trainer(ot.Recipe.load(run / "recipe.yaml", overrides))
        answers = trainer.evaluator.evaluate(lambda doing: None).answers
        save_samples(answers, folder, per_source=SAVED, step=0)
    return folder


def samples(folder: Path) -> dict:
    """Return the samples of each source, the step and the folder."""
    saved = json.loads((folder / "samples.json").read_text())
    found = {source: [one for one in saved["samples"] if one["source"] == source] for source in TASKS}
    return found | {"step": saved["step"], "folder": folder}


def show(image: Image.Image, corner: tuple[int, int], parts: list[dict], folder: Path, judges: tuple = ()) -> None:
    """Draw texts, images and waveforms beside each other; below a generated medium, the digit that a judge sees."""
    draw, (left, top) = ImageDraw.Draw(image), corner
    for part in parts:
        if "text" in part:
            text = "".join(letter if " " <= letter <= "~" else "·" for letter in part["text"])
            text = text if len(text) < 26 else f"{text[:23]}..."
            draw.text((left, top + 30), text, INK, font(16))
            left += int(draw.textlength(text, font(16))) + 12
            continue
        file = folder / part["file"]
        if file.suffix in SUFFIXES:
            left += waveform(draw, (left, top + 10), file)
            judged = judges and judges[1].predict([soundfile.read(file, dtype="float32")[0]])[0]
        else:
            left += pixels(image, (left, top + 10), file)
            judged = judges and judges[0].predict([Image.open(file)])[0]
        if judged:
            draw.text((left, top + 50), f"judge: {judged}", GREY, font(13))


def pixels(image: Image.Image, corner: tuple[int, int], file: Path) -> int:
    """Draw the frames of an image file; return the width that they take."""
    frames = Image.open(file)
    number, side = getattr(frames, "n_frames", 1), MEDIA if getattr(frames, "n_frames", 1) == 1 else 32
    for frame in range(number):
        frames.seek(frame)
        enlarged = frames.convert("RGB").resize((side, side), Image.Resampling.NEAREST)
        image.paste(enlarged, (corner[0] + frame * (side + 3), corner[1] + (MEDIA - side) // 2))
    return number * (side + 3) + 8


def waveform(draw: ImageDraw.ImageDraw, corner: tuple[int, int], file: Path) -> int:
    """Draw the loudness of a clip over time, 0.7 seconds wide; return the width that it takes."""
    clip, rate = soundfile.read(file, dtype="float32")
    width = max(1, min(110, round(110 * len(clip) / rate / 0.7)))
    peaks = [float(np.abs(part).max(initial=0)) for part in np.array_split(clip, width)]
    middle, scale = corner[1] + MEDIA // 2, MEDIA / 2 / max(max(peaks), 1e-3)
    for position, peak in enumerate(peaks):
        draw.line((corner[0] + position, middle - peak * scale, corner[0] + position, middle + peak * scale), "#2f6fb0")
    return width + 10


def font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Return Pillow's own font."""
    return ImageFont.load_default(size)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

"""Write generated answers to files that people can view and play."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import soundfile
from PIL import Image

from omnitrain.data.chat.parts import content_parts
from omnitrain.data.sources.clips import Clip
from omnitrain.data.sources.rows import MODALITIES, Row
from omnitrain.errors import UserError
from omnitrain.packages import install_command
from omnitrain.train.evaluate.evaluate import Answered, reference_text
from omnitrain.train.metrics.trackers import ShownSample

_SUFFIXES = ((b"\x89PNG", ".png"), (b"\xff\xd8", ".jpg"), (b"GIF8", ".gif"), (b"fLaC", ".flac"), (b"OggS", ".ogg"))
_LIST = "samples.json"
_SHOWN_WIDTH = 128  # pixels; generated digits are 8 wide


def save_samples(
    answers: Sequence[Answered], folder: Path, per_source: int, step: int
) -> tuple[Path, list[ShownSample]]:
    """Write ``samples.md``, ``samples.json`` and media of each source's first answers; return page and samples."""
    folder.mkdir(parents=True, exist_ok=True)
    _set_earlier_aside(folder, step)
    counts: dict[str, int] = {}
    saved: list[dict[str, Any]] = []
    samples: list[ShownSample] = []
    lines = ["# Generated samples", ""]
    for answered in answers:
        row = answered.row
        counts[row.source] = counts.get(row.source, 0) + 1
        if counts[row.source] <= per_source:
            stem = re.sub(r"\W+", "_", f"{row.source}_{counts[row.source]}")
            prompt, reference = _write_messages(row, folder, stem)
            answer = write_parts(answered.answer.parts, folder, stem)
            name = f"{row.source} {counts[row.source]}"
            samples.append(ShownSample(name, {"prompt": prompt, "answer": answer, "reference": reference}))
            asked, said, expected = (" ".join(map(_markdown, parts)) for parts in (prompt, answer, reference))
            lines += [f"## {name}", "", f"Asked (`{row.id}`): {asked}", "", f"Answered: {said}", ""]
            lines += [f"Reference: {expected}", ""] if expected else []
            parts = {"prompt": [*map(_part, prompt)], "answer": [*map(_part, answer)]}
            parts["reference_parts"] = [*map(_part, reference)]
            saved.append({"source": row.source, "id": row.id, **parts, "reference": reference_text(row)})
    (folder / _LIST).write_text(json.dumps({"step": step, "samples": saved}, indent=1) + "\n")
    page = folder / "samples.md"
    page.write_text("\n".join(lines))
    return page, samples


def write_parts(parts: Sequence[Any], folder: Path, stem: str, films: str = "webp") -> list[str | Path]:
    """Write generated media as ``STEM_N.png``, ``.wav`` and ``.webp`` (or ``.mp4``: ``films``); return texts, paths."""
    return [
        part if isinstance(part, str) else _write_part(part, folder / f"{stem}_{position}", films)
        for position, part in enumerate(parts)
    ]


def _write_part(part: Any, stem: Path, films: str) -> Path:
    kind = "png" if isinstance(part, Image.Image) else films if isinstance(part, Clip) else "wav"
    file = stem.with_name(f"{stem.name}.{kind}")
    if isinstance(part, Image.Image):
        part.save(file)
    elif isinstance(part, Clip):
        write_film(part, file)
    else:
        soundfile.write(file, part.samples, part.rate)
    return file


def write_film(film: Clip, file: Path) -> None:
    """Write the frames of a film, which lasts ``film.seconds``: a lossless animated WebP, or by PyAV an MP4 (H.264).

    Raises:
        UserError: an MP4 is asked for, and PyAV is not installed.
    """
    seconds, (first, *others) = film.seconds or len(film.frames), film.frames
    if file.suffix == ".webp":
        duration = round(1000 * seconds / len(film.frames))
        first.save(file, save_all=True, append_images=others, duration=duration, loop=0, lossless=True)
        return
    require_mp4()
    import av

    is_even = not (first.width % 2 or first.height % 2)  # players want half the colours, which odd sides do not have
    with av.open(str(file), "w") as container:
        stream = container.add_stream("h264", rate=Fraction(len(film.frames) / seconds).limit_denominator(1000))
        stream.width, stream.height, stream.pix_fmt = *first.size, "yuv420p" if is_even else "yuv444p"
        for frame in film.frames:
            container.mux(stream.encode(av.VideoFrame.from_image(frame)))
        container.mux(stream.encode())


def require_mp4() -> None:
    """Raise UserError if PyAV, which writes MP4, is not installed."""
    try:
        import av  # noqa: F401
    except ImportError as error:
        raise UserError(f"an MP4 needs PyAV ({error}); {install_command('video')}, or write WebP") from None


def free_stem(folder: Path, stem: str) -> str:
    """Return ``stem``, or ``stem2``, ``stem3``, ...: the first with which no file ``STEM_N`` of the folder begins."""
    taken = {file.name.rpartition("_")[0] for file in folder.iterdir()}
    return next(name for name in (stem, *(f"{stem}{n}" for n in range(2, len(taken) + 3))) if name not in taken)


def _set_earlier_aside(folder: Path, step: int) -> None:
    """Move the samples of another step to ``step-N``, so that one can see how they change."""
    try:
        earlier = json.loads((folder / _LIST).read_text())["step"]
    except (OSError, ValueError):  # none were written, or not to their end
        return
    if earlier != step:
        aside = folder / f"step-{earlier:08d}"
        shutil.rmtree(aside, ignore_errors=True)  # of a run that went back to an earlier checkpoint
        files = [file for file in folder.iterdir() if file.is_file()]
        aside.mkdir()
        for file in files:
            file.rename(aside / file.name)


def _part(part: str | Path) -> dict[str, str]:
    return {"text": part} if isinstance(part, str) else {"file": part.name}


def _write_messages(row: Row, folder: Path, stem: str) -> tuple[list[str | Path], list[str | Path]]:
    """Write the media of a row to files. Return the parts of its question and of its last answer, in order."""
    shown: dict[str, list[str | Path]] = {"prompt": [], "reference": []}
    seen = dict.fromkeys(MODALITIES, 0)
    for number, message in enumerate(row.messages):
        role = "prompt" if number < len(row.question) else "reference"
        for part in content_parts(message):
            if part["type"] == "text":
                shown[role].append(part["text"])
                continue
            data = row.media_bytes(part["type"], seen[part["type"]])
            seen[part["type"]] += 1
            file = folder / f"{stem}_{role}_{len(shown[role])}{_suffix(data)}"
            file.write_bytes(data)
            shown[role].append(file)
    return shown["prompt"], shown["reference"]


def _suffix(data: bytes) -> str:
    if data[:4] == b"RIFF":
        return {b"WAVE": ".wav", b"WEBP": ".webp"}.get(data[8:12], ".riff")
    return next((suffix for magic, suffix in _SUFFIXES if data.startswith(magic)), ".bin")


def _markdown(part: str | Path) -> str:
    if isinstance(part, str):
        return part
    is_picture = part.suffix in (".png", ".jpg", ".gif", ".webp")
    return f'<img src="{part.name}" width="{_SHOWN_WIDTH}">' if is_picture else f"[{part.name}]({part.name})"

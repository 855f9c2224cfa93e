"""Files in message parts, as OpenAI, Qwen and HF chat templates write them."""

from __future__ import annotations

import base64
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import fsspec
import pytest
from datasets import Dataset

from omnitrain.data.packing.sample import Rejected, Sample
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.sources.part_files import take_files
from omnitrain.data.sources.rows import RowSource, open_sources
from omnitrain.errors import UserError
from omnitrain.recipe import DataSource
from tests.tiny import png, tiny_model, tiny_processor, wav, webp

NO_FILES: dict[str, list[Any]] = {"image": [], "audio": [], "video": []}


@cache
def processor() -> OmniProcessor:
    return tiny_processor(tiny_model())


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def asks(*parts: dict[str, Any], **columns: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "7"}]}
    return {"messages": [*said, answer], **columns}


def opened(path: Path, rows: list[dict[str, Any]], **node: Any) -> RowSource:
    if path.suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(str(path))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_sources([DataSource.model_validate({"path": str(path), **node})])[0]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "7.png", "detail": "low"}},
        {"type": "image_url", "image_url": "7.png"},
        {"type": "image", "image": "7.png"},
        {"type": "image", "path": "7.png"},
        {"type": "image", "url": "FILE"},
        {"type": "input_image", "image_url": "memory://media/7.png"},
        {"type": "image", "url": "memory://media/7.png"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded(png(7))}"}},
        {"type": "image", "base64": encoded(png(7))},
    ],
)
@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_every_form_of_a_part_shows_the_same_image(tmp_path: Path, part: dict[str, Any], format: str) -> None:
    (tmp_path / "a folder").mkdir()
    (tmp_path / "a folder" / "7.png").write_bytes(png(7))
    with fsspec.open("memory://media/7.png", "wb") as stream:
        stream.write(png(7))
    if part.get("url") == "FILE":
        part = part | {"url": (tmp_path / "a folder" / "7.png").as_uri()}  # a blank is %20 in it
    rows = opened(tmp_path / f"rows.{format}", [asks(part)], media_folder=str(tmp_path / "a folder"))
    assert rows[0].media_bytes("image", 0) == png(7) and rows.shown == {("image", False)}
    detail = {"detail": "low"} if "detail" in str(part) else {}
    assert rows[0].messages[0]["content"] == [{"type": "image", **detail}, {"type": "text", "text": "what?"}]
    sample = processor().sample(rows[0])
    assert isinstance(sample, Sample) and [span.component for span in sample.spans] == ["image_encoder"]


def test_sounds_and_videos_are_parts_likewise(tmp_path: Path) -> None:
    (tmp_path / "3.webp").write_bytes(webp(3))
    parts = [
        {"type": "input_audio", "input_audio": {"data": encoded(wav(1)), "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{encoded(wav(2))}"}},
        {"type": "video_url", "video_url": {"url": str(tmp_path / "3.webp")}},
    ]
    (row,) = opened(tmp_path / "rows.jsonl", [asks(*parts)])
    assert [row.media_bytes("audio", i) for i in range(2)] == [wav(1), wav(2)]
    assert row.media_bytes("video", 0) == webp(3)
    assert [part["type"] for part in row.messages[0]["content"]] == ["audio", "audio", "video", "text"]


def test_a_part_of_a_sound_is_a_part_of_its_file(tmp_path: Path) -> None:
    times = {"start": 0, "stop": 1.5}
    parts = [
        {"type": "audio", "audio": "a.wav", **times},
        {"type": "audio", "audio": {"path": "a.wav", **times}},
        {"type": "input_audio", "input_audio": {"data": encoded(wav(1))}, "stop": 1.5},
    ]
    (row,) = opened(tmp_path / "rows.jsonl", [asks(*parts)], media_folder=str(tmp_path))
    whole = {"path": str(tmp_path / "a.wav"), **times}
    assert row.media["audio"] == [whole, whole, {"bytes": wav(1), "stop": 1.5}]


def test_a_part_says_how_its_video_is_read_as_in_qwens_utilities(tmp_path: Path) -> None:
    (tmp_path / "3.webp").write_bytes(webp(3, frames=9))  # 2 fps, 4.5 s
    said = [
        {"video": "3.webp", "nframes": 3},
        {"video_url": {"url": "3.webp", "max_frames": 2}, "type": "video_url", "fps": None},
        {"video": "3.webp", "video_start": 1, "video_end": 2.6},
        {"fps": 1.0},  # of the column
    ]
    row, plain = opened(
        tmp_path / "rows.jsonl",
        [
            asks(*({"type": "video"} | part for part in said), videos=["3.webp"]),
            asks({"type": "video"}, videos=["3.webp"]),
        ],
        media_folder=str(tmp_path),
        fps=0.5,
    )
    assert row.messages[0]["content"][:-1] == [{"type": "video"}] * 4
    frames = [len(span.item.features["frame_index"]) for one in (row, plain) for span in processor().sample(one).spans]
    assert frames == [3, 2, 1, 4, 2]


def test_limits_of_pixels_of_a_part_are_those_of_a_component_or_an_error(tmp_path: Path) -> None:
    part = {"type": "image", "base64": encoded(png(1)), "max_pixels": 64}
    (row,) = opened(tmp_path / "rows.jsonl", [asks(part)])
    with row.open_media("image", 0) as file:
        assert file.reading.max_pixels == 64
    with pytest.raises(UserError, match="image_encoder gives all pictures the same limits of pixels; set `min_pixels`"):
        processor().sample(row)


def test_parts_without_files_show_those_of_the_column_in_turn(tmp_path: Path) -> None:
    own = {"type": "image", "image": "own.png"}
    bare = {"type": "image"}
    rows = [
        asks(bare, own, bare, images=["1.png", "2.png"]),
        asks(own, images=["1.png"]),
        asks(bare, own),
        asks(bare, images=["1.png"]),
    ]
    for name in ("own", "1", "2"):
        (tmp_path / f"{name}.png").write_bytes(png(1))
    found = opened(tmp_path / "rows.jsonl", rows, media_folder=str(tmp_path))
    files = [[file and Path(file).name for file in row.media["image"]] for row in found]
    assert files == [["1.png", "own.png", "2.png"], ["own.png", "1.png"], [None, "own.png"], ["1.png"]]
    assert all(Path(file).parent == tmp_path for file in found[0].media["image"])
    whole, surplus, missing, plain = map(processor().sample, found)
    assert [len(sample.spans) for sample in (whole, plain)] == [3, 1]
    assert "the row has 2 image files, but the messages show 1" in surplus.reason
    assert "image 1 has neither bytes nor a path" in missing.reason


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ({"type": "image_url"}, r"part 1 of message 1 \(image_url\) has no file: expected a path, a URL"),
        ({"type": "image_url", "image_url": {}}, r"part 1 of message 1 \(image_url\): found None in 'image_url'"),
        ({"type": "image", "image": 3}, r"part 1 of message 1 \(image\): found 3 in 'image'; expected a path"),
        ({"type": "image", "image": ""}, "found '' in 'image'"),
        ({"type": "image", "image": "a.png", "url": "b.png"}, r"found \['image', 'url'\]; expected one of them"),
        ({"type": "image", "base64": "a!b"}, "invalid base64: "),
        ({"type": "input_audio", "input_audio": {"data": "###"}}, r"\(input_audio\): invalid base64: "),
        ({"type": "image", "url": "data:image/png;base64"}, "expected data:TYPE;base64,CONTENT"),
        ({"type": "image", "url": "nowhere.png"}, "image 1 cannot be read from its file: .*nowhere.png"),
    ],
)
def test_a_part_whose_file_is_wrong_costs_its_row_and_is_named(
    tmp_path: Path, part: dict[str, Any], problem: str
) -> None:
    good = {"type": "image", "base64": encoded(png(1))}
    rows = opened(tmp_path / "rows.jsonl", [asks(part), asks(good)])
    rejected, sample = map(processor().sample, rows)
    assert isinstance(sample, Sample) and isinstance(rejected, Rejected)
    assert re.search(problem, rejected.reason)


def test_a_modality_that_the_model_cannot_read_is_named_before_training(tmp_path: Path) -> None:
    late = [asks() for _ in range(20)] + [asks({"type": "image_url", "image_url": {"url": "a.png"}})]
    rows = opened(tmp_path / "rows.parquet", late)
    assert rows.first_of_each_kind() == [0, 20]
    with pytest.raises(UserError, match="asks the model to read image"):
        tiny_processor(tiny_model(encoders={})).sample(rows[20])


def test_what_is_no_message_is_left_to_those_who_say_so() -> None:
    for odd in (["hello"], [{"role": "user"}], [{"role": "user", "content": ["a", {"type": "smell"}]}]):
        assert take_files(odd, NO_FILES) == (odd, NO_FILES)


def test_a_part_whose_type_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(asks({"type": ["image"]})))
    (row,) = open_sources([DataSource(path=str(tmp_path / "rows.jsonl"))])[0]
    with pytest.raises(UserError, match=r"row 'rows\[0\]' of 'rows': content part of type \['image'\]: expected text"):
        processor().sample(row, index=0)

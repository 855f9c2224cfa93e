"""Turn the quickstart's videos into a task to write: "show a 7 that moves left" -> the film.

    python tasks/quickstart/make_films.py FOLDER      # a second

It writes `train.parquet` and `heldout.parquet`, whose rows have the columns of the quickstart's, and `vq`: the
quickstart's tokenizer of images, whose convolutions take frames of 12x12 pixels as they take images of 8x8.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import JanusVQVAE

HERE = Path(__file__).parent
TASK = "text_to_film"
PROMPTS = ("show a {} that moves {}", "film the digit {}, moving {}", "a {} goes {}", "move a {} {}")
CODES_OF_A_SIDE = 6


def rows(videos: list[dict]) -> Iterator[dict]:
    """Return a row for each of video_to_text, with question and answer in each other's place."""
    for number, video in enumerate(videos):
        question = PROMPTS[number // 40 % len(PROMPTS)].format(*video["label"].split())
        messages = [
            {"role": "user", "content": [{"type": "text", "text": question}]},
            {"role": "assistant", "content": [{"type": "video", "text": None}]},
        ]
        yield video | {"id": f"{TASK}/{number:05d}", "task": TASK, "messages": messages}


def make_films(folder: Path) -> None:
    """Write the two splits and the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "heldout"):
        table = pq.read_table(HERE / "data" / f"{split}.parquet", filters=[("task", "==", "video_to_text")])
        pq.write_table(pa.Table.from_pylist(list(rows(table.to_pylist())), table.schema), folder / f"{split}.parquet")
    JanusVQVAE.from_pretrained(HERE / "tokenizers" / "image_vq", num_patches=CODES_OF_A_SIDE).save_pretrained(
        folder / "vq"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the files go")
    make_films(parser.parse_args().folder)

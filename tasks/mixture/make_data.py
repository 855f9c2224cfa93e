"""Make the data of the recipe `data_mixture` from that of the quickstart: `data/`, next to this file.

    python tasks/mixture/make_data.py               # a few seconds

    captions-{00..03}.tar   tar shards: a digit (0001.png) and its caption (0001.txt)
    questions.parquet       conversations about one digit or several, in row groups of 200
    texts/*.txt             sums as plain text, one file per table

A second run writes the same bytes.
"""

import argparse
import io
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

QUICKSTART = Path(__file__).parents[1] / "quickstart" / "data" / "train.parquet"
FOLDER = Path(__file__).parent / "data"
SHARDS = 4
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def write_captions(digits: Sequence[tuple[bytes, str]], folder: Path) -> None:
    """Divide images and their labels among the shards."""
    for number in range(SHARDS):
        with tarfile.open(folder / f"captions-{number:02}.tar", "w") as tar:
            for i, (image, label) in enumerate(digits[number::SHARDS]):
                for suffix, content in (("png", image), ("txt", f"the digit {WORDS[int(label)]}".encode())):
                    member = tarfile.TarInfo(f"{i:04}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))


def write_texts(folder: Path) -> None:
    """Write a table of sums for each number up to 99."""
    folder.mkdir(exist_ok=True)
    for a in range(100):
        lines = [f"{a} plus {b} is {a + b}, and {b} minus {a} is {b - a}.\n" for b in range(100)]
        (folder / f"{a:02}.txt").write_text(f"Sums with {a}\n\n{''.join(lines)}")


def main() -> None:
    """Write all files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the files go")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    rows = pq.read_table(QUICKSTART)
    single = rows.filter(pc.equal(rows["task"], "image_to_text"))
    images, labels = single["images"].to_pylist(), single["label"].to_pylist()
    write_captions([(files[0]["bytes"], label) for files, label in zip(images, labels, strict=True)], folder)
    asked = rows.filter(pc.is_in(rows["task"], pa.array(["image_to_text", "images_to_text"])))
    pq.write_table(asked, folder / "questions.parquet", row_group_size=200)
    write_texts(folder / "texts")
    print(f"{folder}: {len(labels)} captions in {SHARDS} shards, {len(asked)} questions, 100 texts")


if __name__ == "__main__":
    main()

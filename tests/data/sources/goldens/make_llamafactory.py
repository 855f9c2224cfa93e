"""Goldens of LLaMA-Factory 0.9.5: `PYTHONPATH=. python tests/data/sources/goldens/make_llamafactory.py`.

With transformers 5.6.0. Its template `qwen2_vl` writes tools and media as the template of `chatml.py`; without a
default system message here, and without the number of tokens of a medium, which is the model's matter.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

from llamafactory.data.converter import get_dataset_converter
from llamafactory.data.parser import DatasetAttr
from llamafactory.data.processor.supervised import SupervisedDatasetProcessor
from llamafactory.data.template import TEMPLATES
from llamafactory.extras.constants import IGNORE_INDEX

from tests.data.sources.goldens.chatml import save, summary, tokenizer
from tests.data.sources.goldens.rows import DOCUMENTED, ROWS

TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}


def attributes(row: dict[str, Any]) -> DatasetAttr:
    """What a `dataset_info.json` says of such rows: the columns that the row has."""
    made = DatasetAttr("file", "rows", formatting="alpaca" if "instruction" in row else "sharegpt")
    for key in ("system", "tools", "images", "videos", "history"):
        setattr(made, key, key if key in row else None)
    made.query = "input" if "input" in row else None
    made.images = "image" if "image" in row else made.images
    made.videos = "video" if "video" in row else made.videos
    if "messages" in row:
        made.messages = "messages"
        for key, value in TAGS.items():
            setattr(made, key, value)
    return made


def golden(row: dict[str, Any]) -> dict[str, Any]:
    """What LLaMA-Factory trains of a row."""
    tokens, template = tokenizer(), copy.deepcopy(TEMPLATES["qwen2_vl"])
    template.default_system, template.mm_plugin.expand_mm_tokens = "", False
    settings = SimpleNamespace(
        media_dir="", mask_history=False, train_on_prompt=False, cutoff_len=4096, neat_packing=False
    )
    processor = SimpleNamespace(
        image_processor=SimpleNamespace(merge_size=1), video_processor=SimpleNamespace(merge_size=1)
    )
    aligned = get_dataset_converter(attributes(row).formatting, attributes(row), settings)(copy.deepcopy(row))
    made = SupervisedDatasetProcessor(template=template, tokenizer=tokens, processor=processor, data_args=settings)
    encoded = made.preprocess_dataset({key: [value] for key, value in aligned.items()})
    (ids,), (labels,) = encoded["input_ids"], encoded["labels"]
    return summary(ids, [label != IGNORE_INDEX for label in labels], tokens)


if __name__ == "__main__":
    formats = {
        f: {n: row for n, row in ROWS[f].items() if (f, n) not in DOCUMENTED}
        for f in ("alpaca", "llama_factory", "llava")
    }
    save("llamafactory", {f: {name: golden(row) for name, row in rows.items()} for f, rows in formats.items()})

"""Goldens of ms-swift 4.6.0 (transformers 5.19.0): `PYTHONPATH=. python tests/data/sources/goldens/make_swift.py`.

Its template `chatml` with the tools of `hermes` writes what the template of `chatml.py` does; an image or video is one
token here, as in that template.
"""

from __future__ import annotations

import copy
import os
import tempfile
from types import SimpleNamespace
from typing import Any

from datasets import Dataset
from PIL import Image
from swift.dataset.preprocessor import AutoPreprocessor
from swift.template import Template
from swift.template.templates.utils import ChatmlTemplateMeta

from tests.data.sources.goldens.chatml import IMAGE, VIDEO, save, summary, tokenizer
from tests.data.sources.goldens.rows import ROWS


class OneToken(Template):
    """Shows media as the template of `chatml.py` does."""

    load_images = False

    def replace_tag(self, media_type: str, index: int, inputs: Any) -> list[Any]:
        return [IMAGE if media_type == "image" else VIDEO]


def golden(row: dict[str, Any]) -> dict[str, Any]:
    """What ms-swift trains of a row."""
    tokens = tokenizer()
    tokens.model_info = SimpleNamespace(task_type="causal_lm", max_model_len=4096, torch_dtype=None, config=None)
    tokens.model_meta = SimpleNamespace(is_multimodal=True, model_arch=None, is_reranker=False)
    template = OneToken(tokens, ChatmlTemplateMeta("chatml", auto_add_bos=False), agent_template="hermes")
    template.set_mode("train")
    data = Dataset.from_list([copy.deepcopy(row)])
    (aligned,) = AutoPreprocessor()(data, load_from_cache_file=False, strict=True, enable_auto_mapping=True)
    encoded = template.encode({key: value for key, value in aligned.items() if value is not None})
    return summary(encoded["input_ids"], [label != -100 for label in encoded["labels"]], tokens)


if __name__ == "__main__":
    os.chdir(tempfile.mkdtemp())
    for name in ("cat.png", "dog.png"):
        Image.new("RGB", (4, 4)).save(name)
    made = {f: {name: golden(row) for name, row in ROWS[f].items()} for f in ("sharegpt", "ms_swift")}
    save("ms-swift", made)

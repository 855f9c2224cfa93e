"""Goldens of axolotl 0.19.0 (transformers 5.16.1): `PYTHONPATH=. python tests/data/sources/goldens/make_axolotl.py`.

Its data sets of `type: chat_template`, with the keys that axolotl's documentation gives for such rows. It reads
OpenAI's rows with `message_field_training: weight`. Rows with media go the way of its multimodal models.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch
from axolotl.processing_strategies import Qwen2VLProcessingStrategy
from axolotl.prompt_strategies.chat_template import load
from axolotl.utils.dict import DictDefault

from tests.data.sources.goldens.chatml import TEMPLATE, save, summary, tokenizer
from tests.data.sources.goldens.rows import ROWS, SHOWN_BY_TRL

TURNS = {"field_messages": "conversations", "message_property_mappings": {"role": "from", "content": "value"}}


def golden(row: dict[str, Any], flag: str) -> dict[str, Any]:
    """What axolotl trains of a row; `flag` is the key of its messages that says whether they are trained."""
    tokens = tokenizer()
    if any(isinstance(message.get("content"), list) for message in row.get("messages", ())):
        strategy = Qwen2VLProcessingStrategy(SimpleNamespace(tokenizer=tokens), TEMPLATE)
        (shown,) = strategy([row])
        ids = torch.tensor([tokens.apply_chat_template(shown["messages"], return_dict=False)])
        return summary(ids[0].tolist(), (strategy.process_labels(ids) != -100)[0].tolist(), tokens)
    config = DictDefault({"chat_template": "tokenizer_default", "sequence_len": 4096, "train_on_inputs": False})
    source = {"message_field_training": flag, **(TURNS if "conversations" in row else {})}
    found = load(tokens, config, source).tokenize_prompt(copy.deepcopy(row))
    return summary(found["input_ids"], [label != -100 for label in found["labels"]], tokens)


if __name__ == "__main__":
    of_openai = {name: row for name, row in ROWS["openai"].items() if name not in SHOWN_BY_TRL}
    made = {
        "axolotl": {name: golden(row, "training") for name, row in ROWS["axolotl"].items()},
        "openai": {name: golden(row, "weight") for name, row in of_openai.items()},
    }
    save("axolotl", made)

"""Goldens of TRL 1.16.0: `PYTHONPATH=. python tests/data/sources/goldens/make_trl.py`.

`SFTTrainer` makes the labels of rows without media, with `assistant_only_loss: true`: by default it trains all text of
`messages`. For rows with media, `prepare_multimodal_messages` places the images, as in TRL's collator. OpenAI's rows
with images are read by TRL, too; it expects the arguments of their calls as objects.
"""

from __future__ import annotations

import copy
import json
import tempfile
from typing import Any

from datasets import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM
from trl import SFTConfig, SFTTrainer
from trl.data_utils import prepare_multimodal_messages

from tests.data.sources.goldens.chatml import save, summary, tokenizer
from tests.data.sources.goldens.rows import ROWS, SHOWN_BY_TRL


def golden(row: dict[str, Any]) -> dict[str, Any]:
    """What TRL trains of a row."""
    images = row.get("images") or ([row["image"]] if "image" in row else [])
    if not images:
        return _of_text(row)
    split = len(row.get("prompt", ()))
    messages = prepare_multimodal_messages(row.get("messages") or row["prompt"] + row["completion"], images)
    rest = {"messages": messages} if not split else {"prompt": messages[:split], "completion": messages[split:]}
    return _of_text(rest)


def _of_text(row: dict[str, Any]) -> dict[str, Any]:
    config = Qwen2Config(
        vocab_size=300,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    tokens = tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        settings = SFTConfig(folder, assistant_only_loss=True, report_to=[], use_cpu=True, bf16=False)
        data = Dataset.from_list([copy.deepcopy(row)])
        trainer = SFTTrainer(Qwen2ForCausalLM(config), settings, train_dataset=data, processing_class=tokens)
        found = trainer.train_dataset[0]
    return summary(found["input_ids"], [label != -100 for label in found["labels"]], tokens)


def _of_openai(row: dict[str, Any]) -> dict[str, Any]:
    row = copy.deepcopy(row)
    row["messages"] = prepare_multimodal_messages(row["messages"])
    for function in (call["function"] for message in row["messages"] for call in message.get("tool_calls", ())):
        function["arguments"] = json.loads(function["arguments"])
    return row


if __name__ == "__main__":
    of_openai = {name: _of_openai(ROWS["openai"][name]) for name in SHOWN_BY_TRL}
    made = {"trl": ROWS["trl"], "openai": of_openai}
    save("trl", {f: {name: golden(row) for name, row in rows.items()} for f, rows in made.items()})

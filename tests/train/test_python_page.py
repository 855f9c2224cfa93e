"""The script of docs/python.md runs as it stands, in a process of its own or beside a running event loop."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import torch
from transformers import LlavaForConditionalGeneration

from tests.tiny import png
from tests.train.test_native_foundation import save_llava

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


def test_the_script_of_the_page_learns_its_rows_by_heart_and_saves_what_it_learnt(tmp_path: Path) -> None:
    script = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(script[1], str(PAGE), "exec"), names)
    save_llava(tmp_path / "llava")
    with (tmp_path / "rows.jsonl").open("w") as rows:
        for number, (question, answer) in enumerate({"one?": "ab", "two?": "cd", "three?": "ef"}.items()):
            (tmp_path / f"{number}.png").write_bytes(png(number))
            asked = [{"type": "image"}, {"type": "text", "text": question}]
            messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
            rows.write(json.dumps({"messages": messages, "images": [str(tmp_path / f"{number}.png")]}) + "\n")

    async def notebook() -> list[str]:  # its event loop runs in the thread of the cells
        places = [str(tmp_path / name) for name in ("llava", "rows.jsonl", "saved")]
        return names["all_of_it"](*places, epochs=40, rate=1e-2)

    assert asyncio.run(notebook()) == ["ab", "cd", "ef"]
    model, _ = names["load_checkpoint"](tmp_path / "saved")
    exported = dict(LlavaForConditionalGeneration.from_pretrained(f"{tmp_path}/saved-hf").named_parameters())
    assert exported.keys() == dict(model.foundation.named_parameters()).keys()
    assert all(torch.equal(exported[name], parameter) for name, parameter in model.foundation.named_parameters())

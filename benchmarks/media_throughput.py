"""How fast images become samples, compared with the same HF processor in a plain torch ``DataLoader``.

All processes of a side run on one core. Each side prepares the same JPEG files for LLaVA: ours until they are packs,
the other until they are what the processor returns.
"""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from harness import Result, in_turn, parser, report, start
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.utils.data import DataLoader, Dataset
from transformers import LlavaProcessor, PreTrainedTokenizerFast
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

from omnitrain.data.loading.loader import StepLoader
from omnitrain.data.render.native import NativeInputs
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.render.template_renderer import TemplateRenderer
from omnitrain.data.sources.rows import open_sources
from omnitrain.recipe import Data

FORMULA = (
    "per_core = median over rounds of (our samples per second / samples per second of the DataLoader), each on one "
    "core; per_cpu_second: the same by CPU time of all processes, on a machine that does other work, too"
)
SIDES = ("omnitrain", "dataloader")
SPECIAL = ["<pad>", "</s>", "<image>"]
TEMPLATE = (
    "{% for m in messages %}{{ 'USER: ' if m.role == 'user' else 'ASSISTANT: ' }}{% for c in m.content %}"
    "{% if c.type == 'image' %}<image>\n{% else %}{{ c.text }}{% endif %}{% endfor %}"
    "{{ '</s>' if m.role == 'assistant' else ' ' }}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
WARM = 48  # samples before the first that count


def llava() -> LlavaProcessor:
    """Return the processor of LLaVA 1.5 with a tokenizer of bytes."""
    vocabulary = {token: i for i, token in enumerate(SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        additional_special_tokens=SPECIAL[2:],
        extra_special_tokens={"image_token": "<image>"},
    )
    images = LlavaImageProcessorPil(
        size={"shortest_edge": 336},
        crop_size={"height": 336, "width": 336},
        image_mean=[0.48145466, 0.4578275, 0.40821073],
        image_std=[0.26862954, 0.26130258, 0.27577711],
    )
    return LlavaProcessor(
        images,
        fast,
        patch_size=14,
        vision_feature_select_strategy="default",
        chat_template=TEMPLATE,
        num_additional_image_tokens=1,
    )


def write_rows(folder: Path, number: int) -> Path:
    """Write JPEG files of 640 x 480 and the rows that show them."""
    random = np.random.default_rng(0)
    with open(folder / "rows.jsonl", "w") as lines:
        for i in range(number):
            small = random.integers(0, 255, (15, 20, 3), dtype=np.uint8)
            path = folder / f"{i}.jpg"
            Image.fromarray(small).resize((640, 480), Image.Resampling.BICUBIC).save(path, quality=90)
            content = [{"type": "image"}, {"type": "text", "text": f"What is in picture {i}?"}]
            answer = [{"type": "text", "text": "Spots of many colours."}]
            messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
            lines.write(json.dumps({"messages": messages, "images": [str(path)]}) + "\n")
    return folder / "rows.jsonl"


class HFRows(Dataset[Any]):
    """What a user writes around a HF processor."""

    def __init__(self, path: Path) -> None:
        self.rows, self.processor = [json.loads(line) for line in path.read_text().splitlines()], llava()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        row = self.rows[index]
        image = Image.open(io.BytesIO(Path(row["images"][0]).read_bytes())).convert("RGB")
        text = self.processor.apply_chat_template(row["messages"], tokenize=False)
        return self.processor(text=[text], images=[image], return_tensors="pt")


def ours(path: Path) -> Generator[int, None, None]:
    """Yield the number of samples of each pack."""
    renderer = TemplateRenderer(llava(), NativeInputs({"image": SPECIAL.index("<image>")}))
    data = Data.model_validate({"train": [{"path": str(path)}], "workers": 1, "pack_tokens": 8192})
    loader = StepLoader(open_sources(data.train), OmniProcessor(renderer, {}, {}), data)
    with closing(iter(loader)) as steps:
        for (pack,) in steps:
            yield len(pack.info.ids)


def plain(path: Path) -> Generator[int, None, None]:
    """Yield the number of samples of each batch."""
    rows = HFRows(path)
    while True:
        for batch in DataLoader(rows, batch_size=8, shuffle=True, num_workers=1, collate_fn=list):
            yield len(batch)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process and its children have used, from Linux's /proc."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # its own, and that of children that have ended
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return own + sum(cpu_seconds(int(child)) for task in tasks for child in (task / "children").read_text().split())


def rates(counts: Generator[int, None, None], samples: int) -> tuple[float, float]:
    """Return samples per second and per CPU second."""
    with closing(counts) as taken:
        seen = 0
        while seen < WARM:
            seen += next(taken)
        seen, began, used = 0, time.perf_counter(), cpu_seconds(os.getpid())
        while seen < samples:
            seen += next(taken)
        return seen / (time.perf_counter() - began), seen / (cpu_seconds(os.getpid()) - used)


def measure(rounds: int, samples: int, folder: Path) -> Result:
    """Measure both sides in each round."""
    path, found = write_rows(folder, samples), dict[str, list[float]]()
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    for round_ in range(rounds):
        for side in in_turn(SIDES, round_):
            by_second, by_cpu = rates((ours if side == "omnitrain" else plain)(path), samples)
            found.setdefault(side, []).append(by_second)
            found.setdefault(f"{side}_cpu", []).append(by_cpu)
    os.sched_setaffinity(0, cores)
    ratio, of_cpu = (
        median(one / other for one, other in zip(found[f"omnitrain{by}"], found[f"dataloader{by}"], strict=True))
        for by in ("", "_cpu")
    )
    figures = {name: median(values) for name, values in found.items()}
    return Result("media_throughput", FORMULA, {"per_core": ratio, "per_cpu_second": of_cpu} | figures, found)


def main() -> None:
    """Measure and report."""
    options = parser(sys.modules[__name__].__doc__ or "", rounds=7, steps=1)
    options.add_argument("--samples", type=int, default=480, help="images per side and round")
    given = start(options)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="omnitrain-media-") as folder:
        report(measure(given.rounds, given.samples, Path(folder)), given.json)


if __name__ == "__main__":
    main()

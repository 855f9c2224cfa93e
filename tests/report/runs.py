"""Folders as runs write them, for tests of reports."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.tiny import png, wav

AXES = {"pp": 2, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "sp": 1, "tp": 1}
COMPONENT = {"name": "foundation", "dtype": "float32", "parameters": 10, "trainable": 10}
LAYOUT = {
    "components": [COMPONENT | {"class_name": "Qwen3ForCausalLM", "ops": "attention: sdpa"}],
    "layout": [
        COMPONENT
        | {"section": "", "mode": "fsdp2", "mesh": "pp 2 x 1 x 1", "units": 3, "dtypes": "float32", "recompute": "none"}
        | {"offload": "none", "sequence": "whole"}
    ],
    "sections": [{"name": "main", "first_rank": 0, "components": ["foundation"], "axes": AXES, "ep": 1}],
}


def line(step: int, **others: Any) -> dict[str, Any]:
    """A line of metrics."""
    text = {"loss": 6.0 / step, "tokens": 7}
    return {
        "step": step,
        "loss": 12.5 / step,
        "grad_norm": 3.25 + step,
        "learning_rate": 1e-4 * step,
        "heads": {"text": text},
        "sources": {"web": {"text": text}},
        "tokens_per_second": 1000.0 + step,
        "fill": 0.75,
        "imbalance": 1.125,
        "data_wait": 0.125,
        "memory_mb": 512.5,
        "data": {"web": {"samples": 17, "tokens": 340, "media": {"image_encoder": {"items": 11, "tokens": 44}}}},
        "rejected": {"web": 0},
        "rejected_reasons": {"web": {"unreadable image": 13}},
        **others,
    }


def save_run(folder: Path, lines: Sequence[Mapping[str, Any]], recipe: str = "") -> Path:
    """A run with these lines of metrics and nothing else."""
    folder.mkdir(parents=True)
    settings = "data: {pack_tokens: 64}\ntrain: {steps: 9, packs_per_step: 2}\n"
    (folder / "recipe.yaml").write_text(settings + recipe)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    return folder


def save_samples(folder: Path, step: int, answer: str, media: Mapping[str, bytes] | None = None) -> None:
    """Answers to one row, as an evaluation writes them to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {"asked.png": png(0), "said.wav": wav(0)} if media is None else media
    for name, data in files.items():
        (folder / name).write_bytes(data)
    parts = [{"text": answer}, *({"file": name} for name in files)]
    sample = {"source": "web", "id": "web/1", "prompt": [{"text": "why?"}], "answer": parts, "reference": "so"}
    (folder / "samples.json").write_text(json.dumps({"step": step, "samples": [sample]}))


def save_trace(folder: Path, rank: int, spans: Sequence[tuple[str, str, float, float]]) -> None:
    """A trace of step 2: kind, name, start and duration in milliseconds of each span."""
    (folder / "trace").mkdir(exist_ok=True)
    named = {"ph": "M", "name": "process_name", "args": {"name": f"rank {rank}"}}
    events = [
        {"ph": "X", "cat": kind, "name": name, "ts": 1e3 * start, "dur": 1e3 * duration}
        for kind, name, start, duration in spans
    ]
    (folder / "trace" / f"step-00000002-rank-{rank}.json").write_text(json.dumps({"traceEvents": [named, *events]}))


def whole_run(folder: Path) -> Path:
    """A run with everything that a report shows."""
    cost = {"min": 3, "mean": 4.0, "max": 5, "by_rank": [3, 5]}
    encoder = {"items": 4, "moved": 1, "imbalance_drawn": 1.75, "imbalance": 1.25, "cost": cost, "bytes_moved": 64}
    others = {
        "encoders": {"image_encoder": encoder | {"waited": 0.5}},
        "experts": {"layers.0": {"load": 2.5, "entropy": 0.75, "bytes": 32.0, "exposed": 0.0625}},
        "exposed_communication": {"seconds": 0.0625, "share": 0.375},
        "surprise": {"of": 41.5},
    }
    heldout = {"loss": 4.125, "heads": {"text": {"loss": 4.125, "tokens": 5}}, "sources": {}}
    gap = {"heads": {"text": {"loss": None, "tokens": 0}}, "grad_norm": math.inf}
    run = save_run(folder, [line(1), line(2, **gap), line(3, heldout=heldout, **others)])
    scores = [{"step": 2, "web": 0.25, "seconds": 9.0}, {"step": 3, "web": 0.625, "seconds": 19.0, "losses": heldout}]
    (run / "evaluations.jsonl").write_text("".join(json.dumps(one) + "\n" for one in scores))
    save_samples(run / "samples" / "step-00000002", 2, "because")
    save_samples(run / "samples", 3, "why not")
    spans = [("wait", "wait for data", 0, 10), ("action", "0F0", 10, 40), ("link", "dispatch 0", 20, 10)]
    spans += [("wait", "wait for dispatch 0", 26, 4), ("action", "0B0", 50, 80), ("compute", "optimizer", 130, 5)]
    for rank in range(2):
        save_trace(run, rank, spans)
    (run / "layout.json").write_text(json.dumps(LAYOUT))
    finding = {"section": "versions", "name": "torch", "found": "2.13.0", "ok": True}
    (run / "environment.json").write_text(json.dumps([finding]))
    return run

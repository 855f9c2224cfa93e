from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omnitrain.errors import TrainingError
from omnitrain.models.components.outputs import LossTerm, OmniOutput
from omnitrain.train.metrics.meter import LossMeter, MetricsFile


def test_counts_and_sums_stay_exact_past_two_to_the_24() -> None:
    tokens = 2**23 + 1
    rows = torch.zeros(tokens, dtype=torch.long)
    pack: Any = SimpleNamespace(info=SimpleNamespace(sources=("web",), lengths=(1,)))
    meter = LossMeter()
    for _ in range(5):
        term = LossTerm(torch.tensor(float(tokens)), tokens, torch.ones(()).expand(tokens))
        meter.add(pack, OmniOutput({"text": term}, {"text": rows}, None))
    expected = {"loss": 1.0, "tokens": 5 * tokens}
    assert meter.read() == {"heads": {"text": expected}, "sources": {"web": {"text": expected}}}


def test_a_line_that_cannot_be_written_names_the_file(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(TrainingError, match=r"metrics\.jsonl cannot be written \(No space left on device\)"):
        metrics.write({"step": 1})


def test_a_line_that_a_crash_cut_behind_an_inner_brace_is_dropped_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 2, "heads": {"text": {"loss": 1.0}')
    MetricsFile(path, resume_step=1)
    assert path.read_text() == '{"step": 1}\n'

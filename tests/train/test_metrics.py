from types import SimpleNamespace
from typing import Any

import torch

from omnitrain.models.outputs import LossTerm, OmniOutput
from omnitrain.train.metrics import LossMeter


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

"""A model whose weights are cast computes as transformers' model of that dtype does."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import local_torch_dtype

from omnitrain.models.contract.tiny_model import init_peaked_
from omnitrain.models.hf.compute_dtype import compute_in
from omnitrain.models.hf.load import foundation_class
from omnitrain.ops.rounding import Rounding, Step
from tests.families import granite_speech

LOW = torch.bfloat16


class Mixed(PreTrainedModel):
    """Buffers of all kinds: constants and statistics, in the dtype of the weights, and one that is always fp32."""

    config_class = PreTrainedConfig

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.inner, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.register_buffer("table", torch.linspace(0, 1, 8))
        self.register_buffer("constant", torch.ones(8), persistent=False)
        self.register_buffer("frequencies", torch.arange(8).float())
        self.seen: list[torch.dtype] = []

    def forward(self, rows: Tensor, within: int = 0) -> Tensor:
        self.seen = [self.dtype, self.table.dtype, self.constant.dtype, self.frequencies.dtype]
        if within:
            self(rows, within - 1)  # as a recomputation inside
        if rows.isnan().any():
            raise ValueError("not a number")
        return self.last(self.norm(self.inner(rows) + self.table) * self.constant)


@contextmanager
def cast(model: nn.Module) -> Iterator[None]:
    """What FSDP does with parameters around a forward and a backward."""
    stored = {name: parameter.data for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.data = parameter.data.to(LOW)
    yield
    for name, parameter in model.named_parameters():
        parameter.data = stored[name]


def in_bf16(model: PreTrainedModel) -> PreTrainedModel:
    compute_in(model, dict.fromkeys(model.parameters(), LOW), LOW, lambda _: False)
    return model


def test_buffers_have_the_dtype_of_the_weights_while_their_module_runs() -> None:
    model = in_bf16(Mixed(PreTrainedConfig()))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    rows = torch.randn(5, 8).to(LOW)
    with cast(model):
        for within in (0, 1):
            assert model(rows, within).dtype is LOW and model.seen == [LOW, LOW, LOW, torch.float32]
        with pytest.raises(ValueError, match="not a number"):
            model(rows * torch.nan)
    after = dict(model.named_buffers())
    assert all(after[name].dtype is buffer.dtype for name, buffer in before.items())
    assert all(torch.equal(after[n], b) for n, b in before.items() if not n.startswith("norm."))
    assert model.dtype is LOW and copy.deepcopy(model).dtype is LOW  # of the model that runs, not of its shards


def test_the_statistics_of_a_batch_norm_keep_the_digits_of_fp32() -> None:
    model, exact = in_bf16(Mixed(PreTrainedConfig())), nn.BatchNorm1d(8)
    model.norm.momentum = exact.momentum = 1e-3
    rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    with cast(model):
        for _ in range(3):
            inner = model.inner(rows.to(LOW)) + model.table.to(LOW)
            model.norm(inner)
            exact(inner.float())
    torch.testing.assert_close(model.norm.running_mean, exact.running_mean, rtol=1e-5, atol=1e-8)
    assert not torch.equal(model.norm.running_mean, model.norm.running_mean.to(LOW).float())


def test_in_fp32_nothing_is_done() -> None:
    model = Mixed(PreTrainedConfig())
    compute_in(model, dict.fromkeys(model.parameters(), torch.float32), None, lambda _: False)
    assert not model._forward_hooks and model.dtype is torch.float32


def test_a_tower_with_batch_norms_gives_the_features_of_transformers_in_bf16() -> None:
    config = granite_speech()
    torch.manual_seed(0)
    model = foundation_class(config)(config).train()
    init_peaked_(model)
    with local_torch_dtype(LOW):
        plain = foundation_class(config)(config).train()
    plain.load_state_dict(model.state_dict())
    sound = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(1)).to(LOW)

    def step(of: PreTrainedModel) -> Step:
        of.zero_grad()
        loss = of.model.get_audio_features(sound).pooler_output.float().square().sum()
        loss.backward()
        return loss.item(), {name: p.grad.float() for name, p in of.named_parameters() if p.grad is not None}

    compute_in(model, dict.fromkeys(model.parameters(), LOW), LOW, lambda _: False)
    with cast(model):
        found = Rounding.measure(partial(step, model), dict(model.named_parameters()), lambda _: LOW)
        assert found.beyond(step(plain)) == {}
        assert found.visible < 0.1

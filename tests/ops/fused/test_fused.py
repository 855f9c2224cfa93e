import copy
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.phi3 import modeling_phi3 as phi3
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from omnitrain.errors import UserError
from omnitrain.ops.fused import install as fuse
from omnitrain.ops.fused.install import fuse_ops
from omnitrain.ops.fused.patch_embed import is_patch_embedding, patch_linear
from omnitrain.ops.fused.rms_norm import RMS_NORM, RMSNormForm, fused_rms_norm, rms_norm, rms_norm_form
from omnitrain.ops.fused.rotary import ROTARY, _tables, fused_rotary, is_rotary, rotary, rotary_forward
from omnitrain.ops.fused.swiglu import is_swiglu, swiglu_forward
from omnitrain.ops.registry import Backend

SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": 0,
    "eos_token_id": 0,
    "bos_token_id": 0,
}
FORMS = [
    RMSNormForm(1e-5, offset, rounds_first, by_power)
    for offset in (0.0, 1.0)
    for rounds_first in (True, False)
    for by_power in (True, False)
]


def tiny(model_type: str) -> nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


class Norm(nn.Module):
    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class CentredNorm(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


class BoostedNorm(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 1.001


class GatedNorm(Norm):
    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x)


class MLP(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 32)
        self.act_fn = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_fused_rms_norm_has_the_same_outputs_and_gradients(form, dtype):
    torch.manual_seed(0)
    x, grad = torch.randn(2, 5, 3, 32, dtype=dtype), torch.randn(2, 5, 3, 32, dtype=dtype)
    x, weight = x.transpose(1, 2).requires_grad_(), torch.randn(32, dtype=dtype, requires_grad=True)
    theirs, ours = rms_norm(x, weight, form), fused_rms_norm(x, weight, form)
    assert torch.equal(ours, theirs)
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    rows = exact[0] * (exact[0].pow(2).mean(-1, keepdim=True) + form.eps).rsqrt() * (exact[1] + form.offset)
    true = torch.autograd.grad(rows, exact, grad.transpose(1, 2).double())
    for mine, right in zip(torch.autograd.grad(ours, (x, weight), grad.transpose(1, 2)), true, strict=True):
        assert mine.dtype == dtype
        assert ((mine - right).norm() / right.norm()).item() <= (1e-6 if dtype == torch.float32 else 4e-3)


def test_fused_rms_norm_refuses_a_second_derivative():
    x = torch.randn(3, 32, requires_grad=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(fused_rms_norm(x, None, FORMS[0]).sum(), x, create_graph=True)


@pytest.mark.parametrize(
    ("model_type", "norms"), [("qwen3", 9), ("llama", 5), ("gemma2", 9), ("gemma3_text", 13), ("olmo2", 9)]
)
def test_an_unmodified_model_computes_the_same_bits_with_fused_norms(model_type, norms):
    plain = tiny(model_type)
    fused, keys, ids = copy.deepcopy(plain), list(plain.state_dict()), torch.randint(0, 60, (1, 20))
    report = fuse_ops(fused, {"rms_norm": "fused"})["rms_norm"]
    assert (report.backend, report.classes.total()) == ("fused", norms)
    assert list(fused.state_dict()) == keys
    outputs = [model(input_ids=ids, use_cache=False).logits for model in (plain, fused)]
    assert torch.equal(*outputs)
    for output in outputs:
        output.square().sum().backward()
    for theirs, mine in zip(plain.parameters(), fused.parameters(), strict=True):
        assert (mine.grad - theirs.grad).norm() <= 1e-5 * theirs.grad.norm()


def test_a_copy_of_a_fused_model_uses_its_own_weights():
    fused = nn.Sequential(Norm())
    fuse_ops(fused, {"rms_norm": "fused"})
    twin, x = copy.deepcopy(fused), torch.randn(2, 32)
    with torch.no_grad():
        twin[0].weight.mul_(2)
    assert torch.equal(twin(x), 2 * fused(x))


@pytest.mark.parametrize("module", [CentredNorm(), BoostedNorm(), GatedNorm(), nn.LayerNorm(32), nn.Dropout(0.05)])
def test_a_norm_that_computes_something_else_is_left_alone(module):
    state = torch.get_rng_state()
    assert rms_norm_form(Norm()) is not None
    assert rms_norm_form(module) is None
    assert torch.equal(torch.get_rng_state(), state)


def test_recognition_needs_no_values():
    with torch.device("meta"):
        assert rms_norm_form(Norm()) == RMSNormForm(1e-6, offset=0.0, rounds_first=True, by_power=False)
        assert is_swiglu(MLP(nn.SiLU()))


def test_a_gated_mlp_is_recognised_by_what_it_computes():
    mlp, x = MLP(nn.SiLU()), torch.randn(3, 32)
    assert is_swiglu(mlp) and torch.equal(swiglu_forward(mlp, x), mlp(x))
    assert not is_swiglu(MLP(nn.GELU())) and not is_swiglu(nn.Linear(3, 3))
    assert sum(is_swiglu(module) for module in tiny("qwen3").modules()) == 2
    assert sum(is_swiglu(module) for module in tiny("gemma2").modules()) == 0  # its gate is a gelu


@pytest.mark.parametrize(
    ("conv", "shape"),
    [
        (nn.Conv2d(3, 8, 4, stride=4), (2, 3, 16, 8)),
        (nn.Conv2d(3, 8, (2, 4), stride=(2, 4), bias=False), (2, 3, 9, 11)),
        (nn.Conv2d(3, 8, 4, stride=4), (3, 8, 8)),
        (nn.Conv3d(3, 8, (2, 4, 4), stride=(2, 4, 4), bias=False), (5, 3, 2, 4, 4)),
        (nn.Conv3d(3, 8, (2, 4, 4), stride=(2, 4, 4), padding="valid"), (2, 3, 4, 8, 9)),
    ],
)
def test_a_patch_embedding_runs_as_a_linear_on_the_same_weight(conv, shape):
    assert is_patch_embedding(conv)
    x, conv = torch.randn(shape, requires_grad=True), conv
    theirs, ours = conv(x), patch_linear(x, conv.weight, conv.bias)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    grad, inputs = torch.randn_like(theirs), [x, *conv.parameters()]
    expected = torch.autograd.grad(theirs, inputs, grad)
    for mine, right in zip(torch.autograd.grad(ours, inputs, grad), expected, strict=True):
        assert (mine - right).norm() <= 1e-6 * right.norm()
    model = nn.Sequential(conv)
    keys = list(model.state_dict())
    assert fuse_ops(model, {"patch_embed": "auto"})["patch_embed"].classes.total() == 1
    assert list(model.state_dict()) == keys and torch.equal(model(x), ours)


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(4, 8, 3, stride=2),
        nn.Conv2d(4, 8, 4, stride=4, padding=1),
        nn.Conv2d(4, 8, 4, stride=4, dilation=2),
        nn.Conv2d(4, 8, 4, stride=4, groups=2),
        nn.Conv2d(4, 8, 1),
        nn.Conv1d(4, 8, 4, stride=4),
        nn.ConvTranspose2d(4, 8, 4, stride=4),
    ],
    ids=str,
)
def test_other_convolutions_stay(conv):
    assert not is_patch_embedding(conv)


def test_what_cannot_run_is_refused_by_name():
    model = nn.Sequential(Norm())
    with pytest.raises(UserError, match="rms_norm: backend 'liger' runs only on CUDA, not on cpu"):
        fuse_ops(model, {"rms_norm": "liger"})
    with pytest.raises(UserError, match="no backend 'fast'; expected auto, fused, torch, liger"):
        fuse_ops(model, {"rms_norm": "fast"})
    with pytest.raises(UserError, match="no operation 'rope'"):
        fuse_ops(model, {"rope": "auto"})


def test_auto_suits_the_device_of_the_training_not_that_of_the_building():
    norms = {"rms_norm": "auto"}
    assert fuse_ops(nn.Sequential(Norm()), norms)["rms_norm"].backend == "fused"
    assert fuse_ops(nn.Sequential(Norm()), norms, torch.device("cuda"))["rms_norm"].backend == "torch"


def test_torch_means_the_models_own_code():
    model = nn.Sequential(Norm(), MLP(nn.SiLU()))
    report = fuse_ops(model, {"rms_norm": "torch", "swiglu": "auto"})
    assert {name: (op.backend, op.classes.total()) for name, op in report.items()} == {
        "rms_norm": ("torch", 0),
        "swiglu": ("torch", 0),
    }
    assert "forward" not in vars(model[0])


def test_liger_gets_the_form_of_the_norm(monkeypatch):
    class Function:
        @staticmethod
        def apply(x, weight, eps, offset, casting, in_place):
            assert (eps, offset, casting, in_place) == (1e-5, 0.0, "llama", False)
            return F.rms_norm(x, (32,), weight, eps)

    for name in ("liger_kernel", "liger_kernel.ops", "liger_kernel.ops.rms_norm"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(LigerRMSNormFunction=Function))
    x = torch.randn(2, 32)
    torch.testing.assert_close(RMS_NORM[-1].run(x, Norm().weight, FORMS[1]), F.rms_norm(x, (32,), eps=1e-5))


def apart(query, key, cos, sin):
    """What recognition must not take for the reference: neighbouring features are pairs."""
    pairs = [torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) for x in (query, key)]
    return tuple(x * cos[:, None] + y * sin[:, None] for x, y in zip((query, key), pairs, strict=True))


def test_rotary_functions_are_recognised_by_what_they_compute():
    assert is_rotary(qwen3.apply_rotary_pos_emb) and not is_rotary(qwen3.apply_rotary_pos_emb, partial=True)
    assert is_rotary(phi3.apply_rotary_pos_emb) and is_rotary(phi3.apply_rotary_pos_emb, partial=True)
    assert is_rotary(rotary) and is_rotary(rotary, partial=True)
    assert not any(map(is_rotary, (apart, qwen3.eager_attention_forward, qwen3.rotate_half, torch.stack)))


@pytest.mark.parametrize(
    ("model_type", "layers"), [("qwen3", 2), ("llama", 2), ("gemma2", 2), ("cohere", 0), ("glm", 0)]
)
def test_another_rotary_runs_in_every_layer_of_one_model_and_in_no_other(model_type, layers, monkeypatch):
    calls = []

    def counted(*args):
        calls.append([x.shape for x in args])
        return rotary(*args)

    monkeypatch.setitem(fuse._OPERATIONS, "rotary", ((Backend("mine", counted),), rotary_forward))
    plain = tiny(model_type)
    fused, keys, ids = copy.deepcopy(plain), list(plain.state_dict()), torch.randint(0, 60, (1, 20))
    assert fuse_ops(fused, {"rotary": "mine"})["rotary"].classes.total() == layers
    outputs = [model(input_ids=ids, use_cache=False).logits for model in (plain, copy.deepcopy(fused))]
    assert torch.equal(*outputs) and list(fused.state_dict()) == keys
    assert calls == [[(1, 2, 20, 16), (1, 1, 20, 16), (1, 20, 16), (1, 20, 16)]] * layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_fused_rotary_has_the_bits_of_the_reference_forward_and_backward(dtype, batch):
    angles = torch.randn(1, 9, 8).repeat(1, 1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    gradients = [torch.randn(batch, 9, heads, 16, dtype=dtype) for heads in (4, 2)]
    for _ in range(2):  # the second time it finds its tables
        states = [torch.randn(batch, 9, heads, 16, dtype=dtype, requires_grad=True) for heads in (4, 2)]
        found = []
        for run in (rotary, fused_rotary):
            turned = run(*(x.transpose(1, 2) for x in states), cos, sin)
            found.append([*turned, *torch.autograd.grad(turned, states, [g.transpose(1, 2) for g in gradients])])
        assert all(map(torch.equal, *found))


def test_tables_of_rotary_positions_go_with_their_forward_and_differ_where_their_sines_do():
    query, key, angles = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 5, 16), torch.randn(1, 5, 16)
    cos, kept = angles.cos(), len(_tables)
    for sin in (angles.sin(), -angles.sin()):
        assert all(map(torch.equal, fused_rotary(query, key, cos, sin), rotary(query, key, cos, sin)))
    assert len(_tables) == kept + 1
    del cos
    assert len(_tables) == kept


def test_trained_rotary_tables_get_their_gradients():
    query, key, angles = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 5, 16), torch.randn(1, 5, 16, requires_grad=True)
    (plain,), (fused,) = (
        torch.autograd.grad(sum(x.pow(3).sum() for x in run(query, key, angles.cos(), angles * 2)), angles)
        for run in (rotary, fused_rotary)
    )
    assert torch.equal(plain, fused) and plain.count_nonzero() == angles.numel()


def test_calls_of_another_kind_go_to_the_models_own_rotary():
    attention = tiny("qwen3").model.layers[0].self_attn
    forward = rotary_forward(attention, lambda *_: pytest.fail("not its kind of call"))
    apply = forward.__globals__["apply_rotary_pos_emb"]
    query, key, cos = torch.randn(1, 5, 2, 16), torch.randn(1, 5, 1, 16), torch.randn(1, 5, 16)
    for args, kwargs in (
        ((query, key, cos, cos), {"unsqueeze_dim": 2}),
        ((query, key, cos, cos, 2), {}),
        ((query.transpose(1, 2).bfloat16(), key.transpose(1, 2).bfloat16(), cos, cos), {}),
    ):
        expected = qwen3.apply_rotary_pos_emb(*args, **kwargs)
        assert all(map(torch.equal, apply(*args, **kwargs), expected))


def test_liger_turns_whole_heads_and_the_reference_parts_of_them(monkeypatch):
    class Function:
        @staticmethod
        def apply(query, key, cos, sin):
            return query + 1, key + 1

    for name in ("liger_kernel", "liger_kernel.ops", "liger_kernel.ops.rope"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(LigerRopeFunction=Function))
    query, key, cos = torch.randn(1, 2, 5, 16), torch.randn(1, 1, 5, 16), torch.randn(1, 5, 16)
    assert torch.equal(ROTARY[-1].run(query, key, cos, cos)[1], key + 1)
    part = cos[..., :8]
    assert all(map(torch.equal, ROTARY[-1].run(query, key, part, part), rotary(query, key, part, part)))

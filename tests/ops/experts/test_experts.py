"""Experts through the registered function, against transformers' own loop over experts."""

from __future__ import annotations

import copy
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.aria.modeling_aria import AriaExperts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from omnitrain.errors import UserError
from omnitrain.ops.experts import entry
from omnitrain.ops.experts import grouped_mm as grouped
from omnitrain.ops.experts.install import set_experts, use_omnitrain_experts

HIDDEN, INNER = 16, 24
CLASSES = {
    "plain": Qwen3MoeExperts,
    "biases, transposed, interleaved": GptOssExperts,
    "transposed": AriaExperts,
    "without a gate": NemotronHExperts,
    "a norm behind": MuseSparkExperts,
}


def layer(kind: str = "plain", num_experts: int = 5) -> Any:
    """Experts of one class with random weights."""
    counts = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), num_experts)
    widths = {"hidden_size": HIDDEN, "moe_hidden_size": HIDDEN, "moe_latent_size": None}
    inner = dict.fromkeys(("intermediate_size", "moe_intermediate_size"), INNER)
    acts = dict.fromkeys(("hidden_act", "mlp_hidden_act"), "silu")
    swiglu = {"swiglu_alpha": 1.7, "swiglu_limit": 0.5, "post_norm_eps": 1e-6, "_experts_implementation": "eager"}
    torch.manual_seed(0)
    experts = CLASSES[kind](SimpleNamespace(**counts, **widths, **inner, **acts, **swiglu))
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.5)
    return experts


def inputs(tokens: int = 41, num_experts: int = 5, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, experts of each, of which the last expert gets none, and weights."""
    generator = torch.Generator().manual_seed(1)
    index = torch.rand(tokens, num_experts - 1, generator=generator).topk(3)[1]
    return (
        torch.randn(tokens, HIDDEN, generator=generator).to(dtype),
        index,
        torch.rand(tokens, 3, generator=generator).to(dtype),
    )


def trained(experts: nn.Module, implementation: str, given: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    """Output and gradients: of tokens, weights and every parameter."""
    experts = copy.deepcopy(experts).to(given[0].dtype)
    experts.config._experts_implementation = implementation
    hidden, weights = given[0].clone().requires_grad_(), given[2].clone().requires_grad_()
    output = experts(hidden, given[1], weights)
    output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(output.dtype))
    return [output.detach(), *(tensor.grad for tensor in (hidden, weights, *experts.parameters()))]


def error(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest, relative to the largest value of its tensor."""
    pairs = zip(found, expected, strict=True)
    return max(float((a.float() - b.float()).abs().max() / b.float().abs().max().clamp(min=1e-9)) for a, b in pairs)


@pytest.mark.parametrize("kind", CLASSES)
def test_every_declared_layout_equals_the_loop_over_experts(kind: str) -> None:
    experts = layer(kind)
    assert error(trained(experts, "omnitrain", inputs()), trained(experts, "eager", inputs())) < 2e-6


def test_bf16_is_as_near_to_fp32_as_the_function_of_transformers() -> None:
    experts, exact = layer(), inputs()
    rounded = tuple(t.bfloat16() if t.is_floating_point() else t for t in exact)
    expected = trained(
        experts.bfloat16().float(), "eager", tuple(t.float() if t.dtype.is_floating_point else t for t in rounded)
    )
    ours, theirs = (error(trained(experts, name, rounded), expected) for name in ("omnitrain", "grouped_mm"))
    assert ours < 0.02 and ours <= 1.1 * theirs


def test_weights_of_another_dtype_are_not_rounded() -> None:
    hidden, index, weights = inputs(dtype=torch.bfloat16)
    experts = layer().bfloat16()
    use_omnitrain_experts(experts)
    output = experts(hidden, index, weights.float() * (1 + 2**-12))
    doubled = experts(hidden.repeat(2, 1), index.repeat(2, 1), torch.cat([weights, weights]).float() * (1 + 2**-12))
    assert output.dtype == torch.bfloat16 and torch.equal(doubled[: len(output)], output)


def test_widths_that_torch_has_no_grouped_product_for_are_filled_up(monkeypatch: pytest.MonkeyPatch) -> None:
    product, widths = grouped.F.grouped_mm, []

    def checked(left: Tensor, right: Tensor, **given: Any) -> Tensor:
        for operand in (left, right):
            assert max(operand.stride()[-2:]) * operand.element_size() % 16 == 0 and 1 in operand.stride()[-2:]
        widths.append(left.size(1))
        return product(left, right, **given)

    monkeypatch.setattr(grouped.F, "grouped_mm", checked)
    monkeypatch.setattr(sys.modules[__name__], "HIDDEN", 13)
    monkeypatch.setattr(sys.modules[__name__], "INNER", 7)
    for kind in ("plain", "biases, transposed, interleaved"):
        experts = layer(kind)
        assert error(trained(experts, "omnitrain", inputs()), trained(experts, "eager", inputs())) < 2e-6
    assert len(widths) == 2 * 6 and set(widths) >= {8, 16}


def test_an_expert_without_tokens_has_a_gradient_of_zeros() -> None:
    *_, first, down = trained(layer(), "omnitrain", inputs())
    assert first[-1].abs().max() == down[-1].abs().max() == 0 and first[:-1].abs().amax((1, 2)).min() > 0


def test_what_a_kernel_leaves_for_an_expert_without_tokens_is_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    product = grouped.F.grouped_mm

    def leaves_memory(left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
        made = product(left, right, offs=offs)
        return made.index_fill_(0, torch.tensor(4), torch.nan) if right.ndim == 2 else made

    expected = trained(layer(), "omnitrain", inputs())
    monkeypatch.setattr(grouped.F, "grouped_mm", leaves_memory)
    assert trained(layer(), "omnitrain", inputs())[-1].isnan().any()
    monkeypatch.setattr(grouped, "_leaves_empty_sums", lambda device: True)
    for ours, plain in zip(trained(layer(), "omnitrain", inputs()), expected, strict=True):
        assert torch.equal(ours, plain)


def test_no_tokens_at_all_still_have_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped.F, "grouped_mm", None)  # no kernel is asked
    experts = layer("biases, transposed, interleaved")
    empty = torch.empty(0, HIDDEN), torch.empty(0, 3, dtype=torch.long), torch.empty(0, 3)
    output, *gradients = trained(experts, "omnitrain", empty)
    assert output.shape == (0, HIDDEN) and all(float(g.abs().sum()) == 0 for g in gradients) and len(gradients) == 6


@pytest.mark.parametrize("kind", ["plain", "biases, transposed, interleaved"])
def test_a_row_budget_changes_no_result_and_bounds_what_waits_for_the_backward(kind: str) -> None:
    experts, given = layer(kind), inputs(400)
    expected, whole = trained(experts, "omnitrain", given), saved_bytes(experts, given)
    set_experts(experts, row_budget=64)  # of 1200 rows
    assert error(trained(experts, "omnitrain", given), expected) < 2e-6
    rows = 1200 * HIDDEN * 4
    assert saved_bytes(experts, given) < 4 * rows < whole


def saved_bytes(experts: nn.Module, given: tuple[Tensor, Tensor, Tensor]) -> int:
    """Of the activations that autograd keeps, each storage once."""
    experts.config._experts_implementation = "omnitrain"
    own = {parameter.untyped_storage().data_ptr() for parameter in experts.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = experts(given[0].clone().requires_grad_(), *given[1:])
    assert output.requires_grad
    return sum(kept.values())


class Written(TorchDispatchMode):
    """Elements that ops write."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [result] if isinstance(result, Tensor) else [t for t in result if isinstance(t, Tensor)]
        is_view = func._schema.returns[0].alias_info is not None
        self.elements += 0 if is_view else sum(tensor.numel() for tensor in tensors)
        return result


def test_more_experts_cost_no_more_elements_than_their_counts() -> None:
    written = {}
    for number in (8, 512):
        experts = layer(num_experts=number).requires_grad_(False)
        experts.config._experts_implementation = "omnitrain"
        hidden, index, weights = inputs(256, number)
        with Written() as ops:
            experts(hidden.requires_grad_(), index, weights).sum().backward()
        written[number] = ops.elements
    assert written[512] - written[8] <= 2 * (512 - 8)  # their numbers, and where each one's rows end


@pytest.mark.parametrize("backend", ["grouped_mm", "batched_mm"])
def test_a_function_that_transformers_registers_can_be_named(backend: str) -> None:
    experts = layer()
    found = trained(experts, f"omnitrain_{backend}", inputs())
    assert error(found, trained(experts, "eager", inputs())) < 2e-6
    assert backend in {used.name for (module, *_), used in entry._chosen.items() if module == "Qwen3MoeExperts"}


def test_a_backend_that_is_not_there_or_cannot_run_is_refused_with_those_that_can() -> None:
    with pytest.raises(UserError, match=r"no backend 'megablocks'; expected auto, torch, grouped_mm"):
        use_omnitrain_experts(layer(), "megablocks")
    run = partial(trained, layer(), "omnitrain_sonicmoe", inputs())
    with pytest.raises(UserError, match=r"'sonicmoe' runs only on CUDA, not on cpu; choose from auto, torch"):
        run()

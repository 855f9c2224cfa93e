"""RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467): its variants in transformers, and backends for all of them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from omnitrain.ops.registry import Backend, liger_missing


@dataclass(frozen=True)
class RMSNormForm:
    """``x / sqrt(mean(x^2) + eps) * (offset + weight)``, computed in fp32, and how it is rounded."""

    eps: float  # added to the mean square
    offset: float  # 1.0 if the weight is stored around zero, else 0.0
    rounds_first: bool  # normalised rows are rounded to the input's dtype before the multiplication by the weight
    by_power: bool  # uses pow(-0.5) instead of rsqrt; the two differ in the last bit

    def inverse_rms(self, x: Tensor) -> Tensor:
        """Return ``1 / rms`` ``[..., 1]`` fp32 of ``x`` ``[..., hidden]`` fp32."""
        mean_square = x.pow(2).mean(-1, keepdim=True) + self.eps
        return mean_square.pow(-0.5) if self.by_power else mean_square.rsqrt()

    def scaled(self, normalised: Tensor, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Multiply ``normalised`` (fp32) by the weight, with this form's rounding; ``dtype`` is the input's dtype."""
        if weight is None:
            return normalised.to(dtype)
        if self.rounds_first:
            return (self.offset + weight if self.offset else weight) * normalised.to(dtype)
        return (normalised * (self.offset + weight.float())).to(dtype)


def rms_norm(x: Tensor, weight: Tensor | None, form: RMSNormForm) -> Tensor:
    """Compute ``form`` of ``x`` ``[..., hidden]`` in transformers' order of operations; ``weight`` None: no scaling."""
    wide = x.float()
    return form.scaled(wide * form.inverse_rms(wide), weight, x.dtype)


def fused_rms_norm(x: Tensor, weight: Tensor | None, form: RMSNormForm) -> Tensor:
    """Compute :func:`rms_norm`, bit for bit, with a backward that saves and reads less than autograd's."""
    return _FusedRMSNorm.apply(x, weight, form)


class _FusedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, form: RMSNormForm) -> Tensor:
        wide = x.float()
        inverse = form.inverse_rms(wide)
        normalised = wide * inverse
        ctx.form = form
        ctx.save_for_backward(normalised if normalised.dtype == x.dtype else x, inverse, weight)
        return form.scaled(normalised, weight, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """With ``n = x / rms`` and ``g = grad * (offset + weight)``: ``dx = (g - n * mean(g * n)) / rms``."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("fused_rms_norm has no second derivative (create_graph=True); use backend 'torch'")
        kept, inverse, weight = ctx.saved_tensors
        grad, normalised = grad.float(), kept if kept.dtype == inverse.dtype else kept.float() * inverse
        product_TH = (grad * normalised).reshape(-1, kept.size(-1))
        if weight is None:
            scale = kept.new_ones(kept.size(-1), dtype=torch.float32)
        else:
            scale = weight.float() + ctx.form.offset if ctx.form.offset else weight.float()
        grad_weight = product_TH.sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None
        mean = torch.mv(product_TH, scale).div_(kept.size(-1)).view(inverse.shape)
        grad_x = (grad * scale).addcmul_(normalised, mean, value=-1).mul_(inverse)
        return grad_x.to(kept.dtype), grad_weight, None


def _liger_rms_norm(x: Tensor, weight: Tensor | None, form: RMSNormForm) -> Tensor:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    casting = "llama" if form.rounds_first else "gemma"
    return LigerRMSNormFunction.apply(x, weight, form.eps, form.offset, casting, False)


RMS_NORM = (
    Backend("fused", fused_rms_norm, automatic=("cpu",)),
    Backend("torch", rms_norm),
    Backend("liger", _liger_rms_norm, liger_missing, automatic=()),
)


def rms_norm_form(module: nn.Module) -> RMSNormForm | None:
    """Return the form that equals ``module`` bit for bit, on random rows, in fp32, bf16 and both; None: no RMSNorm."""
    parameters = dict(module.named_parameters())
    arguments = list(inspect.signature(module.forward).parameters)
    if len(arguments) != 1 or len(parameters) > 1 or any(True for _ in module.buffers()):
        return None
    if any(True for _ in module.children()) or any(p.dim() != 1 for p in parameters.values()):
        return None
    numbers = {value for value in vars(module).values() if isinstance(value, float) and 0 < value < 0.1}
    forms = [RMSNormForm(*values) for values in product(sorted(numbers), (0.0, 1.0), (True, False), (False, True))]
    with torch.device("cpu"):
        return next((form for form in forms if _behaves_as(module, form, parameters)), None)


def _behaves_as(module: nn.Module, form: RMSNormForm, parameters: dict[str, nn.Parameter]) -> bool:
    size = next((p.numel() for p in parameters.values()), 64)
    generator = torch.Generator().manual_seed(0)
    # Rows of mean square 1, and rows of the size of eps, where a wrong eps shows.
    sizes = torch.tensor([[1.0], [3.0], [form.eps**0.5], [0.1 * form.eps**0.5]])
    rows = torch.randn(2, 4, size, generator=generator) * sizes
    weights = {name: torch.randn(size, generator=generator) for name in parameters}
    for dtype, weight_dtype in product((torch.float32, torch.bfloat16), repeat=2):
        x, values = rows.to(dtype), {name: weight.to(weight_dtype) for name, weight in weights.items()}
        try:
            with torch.random.fork_rng(devices=[]):  # the module may draw random numbers
                theirs = functional_call(module, values, (x,))
        except Exception:  # it does not take one tensor of rows
            return False
        ours = rms_norm(x, next(iter(values.values()), None), form)
        if not (isinstance(theirs, Tensor) and theirs.dtype == ours.dtype and torch.equal(theirs, ours)):
            return False
    return True

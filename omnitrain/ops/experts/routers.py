"""The router of a layer with experts: the module that scores them, and the bias of its choice."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from omnitrain.transformers_private import recordable_outputs


def find_router(model: nn.Module, parent: str) -> tuple[nn.Module, int] | None:
    """Return the router in ``parent`` and the index of the scores in its output, as declared for transformers."""
    recorders = [
        recorder
        for module in model.modules()
        if isinstance(module, PreTrainedModel)
        for name, recorder in recordable_outputs(module).items()
        if name == "router_logits" and isinstance(recorder, OutputRecorder)
    ]
    for module in model.get_submodule(parent).modules():
        for recorder in recorders:
            if isinstance(module, recorder.target_class):
                return module, recorder.index
    return None


def choice_bias(layer: nn.Module, num_experts: int) -> Tensor | None:
    """Return the bias ``[E]``, without gradient, that ``layer`` adds to the scores to choose experts; None: no bias."""
    held: list[tuple[str, Any]] = [*layer.named_buffers(), *layer.named_parameters()]
    for name, tensor in held:
        if name.endswith("_bias") and tensor.numel() == num_experts and not tensor.requires_grad:
            return tensor
    return None

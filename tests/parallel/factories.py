"""Models that ranks build: each factory gives the same model on every rank."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import PreTrainedModel

from omnitrain.models.hf import foundation_class
from omnitrain.models.native import peaked_
from omnitrain.models.omni import OmniModel
from omnitrain.models.outputs import OmniOutput
from tests.families import FAMILIES
from tests.tiny import tiny_model


def any_to_any() -> OmniModel:
    """All modalities, in and out."""
    return tiny_model()


def averaging() -> OmniModel:
    """Its gradients are halved wherever there are ranks: what a mean in place of a sum does on two of them."""
    model = tiny_model()
    if torch.distributed.is_initialized():
        model.register_forward_hook(_halve_gradients)
    return model


def _halve_gradients(module: torch.nn.Module, arguments: object, output: OmniOutput) -> OmniOutput:
    losses = {name: replace(term, sum=(term.sum + term.sum.detach()) / 2) for name, term in output.losses.items()}
    return replace(output, losses=losses)


def _family(name: str) -> PreTrainedModel:
    config = FAMILIES[name]()
    model = foundation_class(config)(config)
    peaked_(model)
    return model


def qwen3_vl() -> PreTrainedModel:
    """Deepstack."""
    return _family("qwen3_vl")


def gemma3() -> PreTrainedModel:
    """Bidirectional image blocks, windows."""
    return _family("gemma3")


def internvl() -> PreTrainedModel:
    """A projector of its own."""
    return _family("internvl")


def deepseek_v3() -> PreTrainedModel:
    """Experts, values of another width."""
    return _family("deepseek_v3")


def qwen2_5_omni_thinker() -> PreTrainedModel:
    """Images, videos, sound."""
    return _family("qwen2_5_omni_thinker")


def qwen3_omni_moe_thinker() -> PreTrainedModel:
    """Images, videos, sound; experts."""
    return _family("qwen3_omni_moe_thinker")


def qwen3() -> PreTrainedModel:
    """Text alone."""
    return _family("qwen3")


def qwen2_5_vl() -> PreTrainedModel:
    """A tower with windows."""
    return _family("qwen2_5_vl")


def qwen3_5() -> PreTrainedModel:
    """Linear attention."""
    return _family("qwen3_5")


def glm4v() -> PreTrainedModel:
    """Markers around videos of their own."""
    return _family("glm4v")

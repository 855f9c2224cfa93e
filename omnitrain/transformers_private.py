"""Every private name of transformers that omnitrain uses: what it is for, and its spelling in each version.

No other file uses one, and a test names those that the installed transformers lacks (``tests/test_private_names.py``).
A name without a remark is the same in transformers 5.23 and 5.24. :data:`omnitrain.packages.WINDOW` has the versions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

# Which outputs a model can record, by its class's name.
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY


class ContainerModel(PreTrainedModel):
    """A model of parts that are models of transformers, and so choose their attention themselves."""

    _supports_sdpa = True

    def __init_subclass__(cls, fp32_modules: Collection[str] = (), **kwargs: Any) -> None:
        """``fp32_modules``: names of modules that transformers keeps in fp32 at any precision."""
        super().__init_subclass__(**kwargs)
        if fp32_modules:
            cls._keep_in_fp32_modules_strict = list(fp32_modules)


def keep_weights(model: torch.nn.Module) -> None:
    """Let transformers not draw the weights of a model in another one, as it does for modules that are not its own."""
    for module in model.modules():
        module._is_hf_initialized = True  # type: ignore[assignment]


def fp32_modules_of(model: PreTrainedModel | type[PreTrainedModel]) -> set[str]:
    """Return the names of modules that transformers keeps in fp32 at any precision."""
    return set(model._keep_in_fp32_modules_strict or ())


def attention_of(config: Any) -> str | None:
    """Return the implementation of attention that a config names; None: transformers chooses."""
    return getattr(config, "_attn_implementation_internal", None)


def set_attention(config: Any, implementation: str | None) -> None:
    """Change :func:`attention_of` of a config and not of those in it."""
    config._attn_implementation_internal = implementation


def set_attention_of_all(config: PreTrainedConfig, implementation: str | None) -> None:
    """Change :func:`attention_of` of a config and of those in it."""
    config._attn_implementation = implementation


def takes_attention(model: PreTrainedModel) -> bool:
    """Whether a model's code uses transformers' ``AttentionInterface``."""
    return bool(model._can_set_attn_implementation())


def experts_of(config: Any) -> str | None:
    """Return the implementation of experts that a config names; None: transformers chooses."""
    return config._experts_implementation


def set_experts_of(config: Any, implementation: str) -> None:
    """Change :func:`experts_of` of a config and not of those in it."""
    config._experts_implementation_internal = implementation


def cache_argument(model: PreTrainedModel) -> str:
    """Return the argument of a model's forward for its cache: ``cache`` in most models of transformers 5.24."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def apply_gate(experts: Any, rows: Any) -> Any:
    """Compute the activation between the two products of gated experts: ``[n, 2 * inner]`` to ``[n, inner]``."""
    return experts._apply_gate(rows)


def recordable_outputs(module: PreTrainedModel) -> Mapping[str, Any]:
    """Return the outputs that a model can record: name -> where they are."""
    return getattr(module, "_can_record_outputs", None) or {}


def keep_recordable_outputs(module: PreTrainedModel) -> None:
    """Let a module of a renamed class record its outputs: transformers looks them up by the name of the class."""
    dict.__setitem__(_CAN_RECORD_REGISTRY, str(type(module)), module._can_record_outputs)


def checkpoint_block(block: Any, function: Callable[..., Any]) -> None:
    """Let a ``GradientCheckpointingLayer`` call ``function(its call, inputs)`` in training."""
    block.gradient_checkpointing = True
    block._gradient_checkpointing_func = function


def checkpoint_of(block: Any) -> Callable[..., Any] | None:
    """Return the function that :func:`checkpoint_block` gave a block; None: the block keeps what its backward needs."""
    return block._gradient_checkpointing_func if block.gradient_checkpointing else None


def audio_lengths(tower: PreTrainedModel) -> Callable[..., Any] | None:
    """Return the function from frames to features of an audio tower; None: it has none."""
    return getattr(tower, "_get_feat_extract_output_lengths", None)


def labels_of_rope_types(config_class: type) -> tuple[str, ...]:
    """Return a config's own names for layers with a rotary embedding of their own."""
    return tuple(getattr(config_class, "_rope_type_labels", ()))


def tied_weights(kind: type[PreTrainedModel]) -> Any:
    """Return which weights of a class are tied: name -> the name of its source; None: none are."""
    return getattr(kind, "_tied_weights_keys", None)


def auto_mapping(auto_class: str) -> Mapping[type[PreTrainedConfig], Any]:
    """Return the classes of models that an auto class knows, by the classes of their configs."""
    return getattr(transformers, auto_class)._model_mapping


@dataclass(frozen=True)
class ConversionsAlone:
    """What transformers reads of a model when it converts weights back. Unlike the model, it can be pickled."""

    _weight_conversions: list[Any]
    config: Any
    shapes: Mapping[str, tuple[int, ...]]

    def get_parameter(self, name: str) -> Tensor:
        """Return a tensor of the parameter's shape, without memory."""
        return torch.empty(self.shapes[name], device="meta")


def conversions_of_weights(model: PreTrainedModel | ConversionsAlone) -> list[Any] | None:
    """Return the conversions that loading applied, and saving reverts; None: the class's conversions."""
    return getattr(model, "_weight_conversions", None)


def set_conversions_of_weights(model: PreTrainedModel, conversions: list[Any] | None) -> None:
    """Change :func:`conversions_of_weights`."""
    model._weight_conversions = conversions


@contextmanager
def loading_through(around: Callable[..., Any]) -> Iterator[None]:
    """Within this context, transformers loads files through ``around(load, model, state_dict, files, config, ...)``."""
    load = PreTrainedModel._load_pretrained_model
    PreTrainedModel._load_pretrained_model = staticmethod(partial(around, load))
    try:
        yield
    finally:
        PreTrainedModel._load_pretrained_model = staticmethod(load)


@contextmanager
def names_not_in_model() -> Iterator[set[str]]:
    """Collect tensor names that the model loaded here lacks, those that its class ignores included."""
    names: set[str] = set()
    adjust = PreTrainedModel._adjust_missing_and_unexpected_keys

    def collect(self: PreTrainedModel, loading_info: Any) -> None:
        names.update(loading_info.unexpected_keys)
        adjust(self, loading_info)

    PreTrainedModel._adjust_missing_and_unexpected_keys = collect
    try:
        yield names
    finally:
        PreTrainedModel._adjust_missing_and_unexpected_keys = adjust


@contextmanager
def dequantizing_through(around: Callable[..., Any]) -> Iterator[None]:
    """Within this context, transformers dequantizes fp8 through ``around(dequantize, self, matrix, scales, dtype)``."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    dequantize = Fp8Dequantize._dequantize_one

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(dequantize, self, *args, **kwargs)

    Fp8Dequantize._dequantize_one = call
    try:
        yield
    finally:
        Fp8Dequantize._dequantize_one = dequantize

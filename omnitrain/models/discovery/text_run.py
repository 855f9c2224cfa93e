"""The text part of tiny runs: find the text decoder, make ids for it, and capture the arguments of its call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from omnitrain.models.discovery.interface import method_name
from omnitrain.models.discovery.parameter_reads import ParameterReads, float_tensors
from omnitrain.models.discovery.placeholders import MODALITY_CODES, extra_arguments, marks, special_ids
from omnitrain.transformers_private import attention_of, set_attention_of_all

MODALITIES = ("image", "video", "audio")


class StopRunError(Exception):
    """Stops a forward early."""


def feature_hosts(model: nn.Module, modality: str) -> list[str]:
    """Return the names of the modules that have the feature method of a modality."""
    return [name for name, module in model.named_modules() if hasattr(type(module), method_name(modality))]


def separate_decoder(model: PreTrainedModel) -> nn.Module | None:
    """Return the text decoder; None if it is the model itself or a module that also contains the towers."""
    decoder = model.get_decoder()
    if not isinstance(decoder, nn.Module) or decoder is model or next(_stacks(decoder), None) is None:
        return None  # an attribute `decoder` may be the head
    return None if any(feature_hosts(decoder, modality) for modality in MODALITIES) else decoder


def first_block(model: PreTrainedModel) -> nn.Module:
    """Return the first layer of the text decoder."""
    return text_blocks(model)[0]


def text_blocks(model: PreTrainedModel) -> nn.ModuleList:
    """Return the layers of the text decoder."""
    decoder = separate_decoder(model)
    if decoder is not None:
        return max(_stacks(decoder), key=len)
    parts = [module for module in model.modules() if isinstance(module, PreTrainedModel) and module is not model]
    towers = [part for part in parts if part.config is not part.config.get_text_config()]
    alone = [tower for tower in towers if not any(feature_hosts(tower, modality) for modality in MODALITIES)]
    in_towers = {id(inner) for tower in alone for inner in tower.modules()}
    return max((stack for stack in _stacks(model) if id(stack) not in in_towers), key=len)


def kind_of_block(block: nn.Module) -> object:
    """Return what layers of one kind have in common: class, names, shapes and freezing of weights, and window."""
    weights = tuple((name, tuple(one.shape), one.requires_grad) for name, one in block.named_parameters())
    patterns = [getattr(part, "sliding_window", None) for part in block.modules()]
    return type(block), weights, tuple(pattern for pattern in patterns if isinstance(pattern, int))


def _stacks(model: nn.Module) -> Iterator[nn.ModuleList]:
    return (module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module))


def called_with(model: PreTrainedModel, module: nn.Module, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments with which the forward calls ``module``, and stop there; RuntimeError: it does not."""
    caught: list[tuple[Any, dict[str, Any]]] = []

    def stop(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        caught.append((args, kwargs))
        raise StopRunError

    with module.register_forward_pre_hook(stop, with_kwargs=True), suppress(StopRunError), ParameterReads(model):
        model(**arguments, use_cache=False)
    if not caught:
        raise RuntimeError("the forward never called its text decoder")
    return caught[0]


def first_position(model: PreTrainedModel) -> int:
    """Return the position from which a model counts if it gets no positions, such as after its padding id; else 0.

    With positions from there, its first layer gets the same arguments as without. Raises what the model's code raises.
    """
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        return 0
    layer = first_block(model)
    embeddings: nn.Embedding = model.get_input_embeddings()
    rows = torch.zeros(1, 3, embeddings.weight.size(1), device=input_device(model), dtype=model.dtype)
    after_padding = 1 + (getattr(model.config.get_text_config(decoder=True), "pad_token_id", None) or 0)
    expected = float_tensors(called_with(model, layer, {"inputs_embeds": rows}))
    for start in dict.fromkeys((0, 1, 2, after_padding)):
        positions = torch.arange(start, start + rows.size(1), device=rows.device)[None]
        got = float_tensors(called_with(model, layer, {"inputs_embeds": rows, "position_ids": positions}))
        if all(torch.equal(one, other) for one, other in zip(expected, got, strict=True)):
            return start
    return 0


def text_arguments(model: PreTrainedModel, modality: str = "image", token: int | None = None, rows: int = 2) -> Any:
    """Return arguments of a forward: ids with ``rows`` placeholders (None: text), a mask, per-token arguments."""
    plain = plain_ids(model, 4)
    size = model.get_input_embeddings().weight.size(0)
    opening, closing = marks(model.config, modality) or (plain[1], plain[2])
    if token is None or max(opening, closing) >= size:
        opening, closing = plain[1], plain[2]
    placeholder = plain[0] if token is None else token
    ids = torch.tensor([[plain[0], opening, *[placeholder] * rows, closing, plain[3]]], device=input_device(model))
    is_row = torch.zeros_like(ids, dtype=torch.bool) if token is None else ids == token
    types = torch.where(is_row, MODALITY_CODES[modality], 0)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        **dict.fromkeys(extra_arguments(type(model)), types),
    }


def plain_ids(model: PreTrainedModel, number: int) -> list[int]:
    """Return ``number`` ids of ordinary text, which the config does not name."""
    used = special_ids(model.config)
    size = model.get_input_embeddings().weight.size(0)
    return list(islice((token for token in range(size) if token not in used), number))


def typed(model: PreTrainedModel, features: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return features in the model's dtype, on the device of tiny runs."""
    device = input_device(model)
    return {k: v.to(device, model.dtype if v.is_floating_point() else v.dtype) for k, v in features.items()}


def input_device(model: PreTrainedModel) -> torch.device:
    """Return the device of tiny runs: the model's device; the CPU for a model without weights."""
    return torch.device("cpu") if model.device.type == "meta" else model.device


@contextmanager
def watching(
    modules: Iterable[tuple[str, nn.Module]],
    before: Callable[..., None] | None = None,
    after: Callable[..., None] | None = None,
) -> Iterator[None]:
    """Call ``before(name, module, args, kwargs)`` and ``after(name, module, args, kwargs, output)`` at each call."""
    with ExitStack() as hooks:
        for name, module in modules:
            if before is not None:
                hooks.enter_context(module.register_forward_pre_hook(partial(before, name), with_kwargs=True))
            if after is not None:
                hooks.enter_context(module.register_forward_hook(partial(after, name), with_kwargs=True))
        yield


@contextmanager
def eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let the whole model use transformers' eager attention, whose masks are plain tensors."""
    every = (getattr(module, "config", None) for module in model.modules())
    configs = {id(config): config for config in every if isinstance(config, PreTrainedConfig)}
    before = {key: attention_of(config) for key, config in configs.items()}
    try:
        for config in configs.values():
            set_attention_of_all(config, "eager")
        yield
    finally:
        for key, config in configs.items():
            set_attention_of_all(config, before[key])


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run in eval mode without gradients; then restore the mode, random states, and tensors that a forward changed."""
    device = next(model.parameters()).device
    training = {module: module.training for module in model.modules()}
    plain = {module: dict(vars(module)) for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        for module, before in plain.items():
            for name, value in vars(module).items():
                if isinstance(value, Tensor) and name in before:
                    vars(module)[name] = before[name]
        for module, mode in training.items():
            module.training = mode

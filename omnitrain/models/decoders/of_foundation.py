"""Find the modules with which a foundation writes a medium by itself (Janus), and move them to a decoder and back.

The forward of such a model in transformers does not use these modules; a method of the model embeds codes with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from omnitrain.errors import UserError
from omnitrain.models.decoders.tokens import TokenDecoder
from omnitrain.models.discovery import ParameterReads, float_tensors, watching
from omnitrain.models.discovery.model_errors import suppress_errors_of_models
from omnitrain.models.discovery.text_run import input_device, undisturbed
from omnitrain.recipe.component_configs import TokenDecoderConfig

_METHOD = "prepare_embeddings_for_image_generation"


def find_writer(model: PreTrainedModel) -> dict[str, Any]:
    """Return the names of the modules that write a medium.

    Args:
        model: the foundation, which may be on the meta device.

    Returns:
        ``tokenizer``: the media tokenizer; ``embedding``: the modules that a code goes through to the input of the
        language model, in order; ``head``: the module that turns its last hidden state into logits of the codes.

    Raises:
        UserError: it has no such modules.
    """
    with torch.device(input_device(model)), undisturbed(model), ParameterReads(model):
        embedding = _called_by(model)
        classes = getattr(model.get_submodule(embedding[0]), "num_embeddings", None) if embedding else None
        tokenizer, head = next(_tokenizers(model, classes), None), next(_heads(model, classes), None)
    if not embedding or tokenizer is None or head is None:
        raise UserError(
            f"{type(model).__name__} does not write images by itself: it has no {_METHOD} with a media tokenizer and a "
            "head of as many codes, as Janus has; set `tokenizer`, or leave the decoder out if codes are words of its "
            "vocabulary, as in Emu3"
        )
    return {"tokenizer": tokenizer, "embedding": embedding, "head": head}


def _called_by(model: PreTrainedModel) -> list[str]:
    """Return the modules that the method calls on a code, each on the result of the one before; else none."""
    calls: list[tuple[str, Any, Any]] = []
    inside: list[str] = []

    def enter(name: str, *_: Any) -> None:
        inside.append(name)

    def leave(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        inside.pop()
        if not inside:
            calls.append((name, args, output))

    codes = torch.zeros(1, 1, dtype=torch.long, device=input_device(model))
    results: list[Any] = []
    with watching(model.named_modules(), enter, leave), suppress_errors_of_models():
        results.append(getattr(model, _METHOD)(codes))
    taken = [args[0] for _, args, _ in calls] + results
    given = [codes, *(output for _, _, output in calls)]
    is_chain = len(taken) == len(given) and all(one is other for one, other in zip(taken, given, strict=True))
    return [name for name, _, _ in calls] if is_chain else []


def _tokenizers(model: PreTrainedModel, classes: int | None) -> Iterator[str]:
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and hasattr(module, "encode"):
            sizes = {getattr(module.config, key, None) for key in ("num_embeddings", "codebook_size")}
            yield from [name] * (classes in sizes)


def _heads(model: PreTrainedModel, classes: int | None) -> Iterator[str]:
    """Yield the modules that turn a hidden state into a logit for each code, the outermost first."""
    hidden = torch.zeros(1, model.get_input_embeddings().weight.size(1), dtype=model.dtype, device=input_device(model))
    for name, module in model.named_modules():
        sizes = [part.out_features for part in module.modules() if isinstance(part, nn.Linear)]
        if isinstance(module, PreTrainedModel) or module is model.get_output_embeddings() or classes not in sizes:
            continue
        with suppress_errors_of_models():
            if [tensor.shape for tensor in float_tensors(module(hidden))] == [(1, classes)]:
                yield name


def decoder_of(foundation: PreTrainedModel, config: TokenDecoderConfig) -> TokenDecoder:
    """Make a decoder of a foundation's modules; :func:`take` removes them there.

    Raises:
        UserError: the media tokenizer refuses the settings, or there are several sizes.
    """
    if config.image_sizes:
        raise UserError("image_sizes: the foundation's own head has no classes for sizes; use `image_size`")
    tokenizer, head, *chain = [foundation.get_submodule(name) for name in _names(config)]
    tokenizer.float()
    return TokenDecoder(config, cast(PreTrainedModel, tokenizer), nn.Sequential(*chain), head)


def take(foundation: PreTrainedModel, decoder: TokenDecoder) -> None:
    """Remove the modules of a decoder from the foundation, if it has them."""
    for owner, attribute, module in _places(foundation, decoder):
        if getattr(owner, attribute, None) is module:
            delattr(owner, attribute)


def give_back(foundation: PreTrainedModel, decoder: TokenDecoder) -> None:
    """Undo :func:`take`."""
    for owner, attribute, module in _places(foundation, decoder):
        setattr(owner, attribute, module)


def _places(foundation: PreTrainedModel, decoder: TokenDecoder) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yield the owner in the foundation, the attribute there, and the module, of each module of a decoder."""
    modules = (decoder.tokenizer, decoder.head, *cast(nn.Sequential, decoder.embedding))
    for name, module in zip(_names(decoder.config), modules, strict=True):
        owner, _, attribute = name.rpartition(".")
        yield foundation.get_submodule(owner), attribute, module


def _names(config: TokenDecoderConfig) -> list[str]:
    names = config.of_foundation or {}
    return [names["tokenizer"], names["head"], *names["embedding"]]

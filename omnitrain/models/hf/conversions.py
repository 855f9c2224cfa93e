"""transformers' conversions between the weights of a checkpoint and of a model, and a conversion that it lacks.

Some checkpoints of Qwen3-VL-MoE have their experts apart (``experts.0.gate_proj.weight``), but the conversion of its
class takes experts that are together. The conversion of other classes reads these names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter, WeightTransform

from omnitrain.transformers_private import conversions_of_weights, loading_through

_APART = re.compile(r"\bmlp\.experts\.\d+\.(gate|up|down)_proj\.weight$")
_FUSED = "mlp.experts.gate_up_proj"
_CLASS = "qwen2_moe"  # whose conversion is for these names


def conversions_of(model: PreTrainedModel) -> list[WeightTransform]:
    """Return the conversions that saving ``model`` reverts, without prefixes that only its checkpoint had."""
    of_checkpoint = conversions_of_weights(model)
    if of_checkpoint is not None:
        return list(of_checkpoint)
    known = get_model_conversion_mapping(model, add_legacy=False)
    return [each for each in known if not isinstance(each, PrefixChange)]


def with_experts_apart(
    known: Sequence[WeightTransform], names: Iterable[str], model: nn.Module, quantizer: Any = None
) -> list[WeightTransform]:
    """Return the conversions ``known``, and others if the tensors ``names`` have experts apart and the model has not.

    ``quantizer``: transformers' quantizer, if the tensors are quantized.
    """
    sources = [source for each in known if isinstance(each, WeightConverter) for source in each.source_patterns]
    is_fused = any(name.endswith(_FUSED) for name, _ in model.named_parameters())
    if not is_fused or any("experts.*." in source for source in sources) or not any(map(_APART.search, names)):
        return list(known)
    apart = get_checkpoint_conversion_mapping(_CLASS)
    targets = [each.target_patterns for each in apart]
    if quantizer is not None:
        apart = quantizer.update_weight_conversions(apart, model)
    return [
        *(each for each in apart if each.target_patterns in targets),
        *(each for each in known if each.target_patterns not in targets),
    ]


@contextmanager
def experts_apart_are_read() -> Iterator[None]:
    """Within this context, transformers loads experts that are apart in safetensors files into fused ones."""

    def load_apart(
        load: Any,
        model: PreTrainedModel,
        state_dict: Any,
        files: list[str] | None,
        config: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        mapping = with_experts_apart(config.weight_mapping or [], _names_in(files or ()), model, config.hf_quantizer)
        return load(model, state_dict, files, replace(config, weight_mapping=mapping), *args, **kwargs)

    with loading_through(load_apart):
        yield


def _names_in(files: Iterable[str]) -> Iterator[str]:
    for file in files:
        if file.endswith(".safetensors"):
            with safe_open(file, framework="pt") as opened:
                yield from opened.keys()

"""Make models use omnitrain's attention; the attention name in their configs holds the choice of backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel, masking_utils, modeling_utils
from transformers.masking_utils import AttentionMaskInterface

from omnitrain.errors import UserError
from omnitrain.ops.attention.entry import AUTO, backend_names, omnitrain_attention, omnitrain_mask
from omnitrain.ops.attention.packed_context import packed_sequence
from omnitrain.ops.attention.unpacked import SDPA
from omnitrain.ops.config_value import config_value
from omnitrain.transformers_private import attention_of, set_attention, takes_attention

SamplesOf = Callable[[Tensor], Tensor | None]


@dataclass(frozen=True)
class Implementation:
    """The meaning of an attention name in a config.

    ``backend`` is for packed sequences (or ``auto``), ``plain`` is transformers' implementation for unpacked input.
    ``passes_offsets``: models should pass ``cu_seq_lens_q`` to attention instead of cutting or masking by themselves.
    """

    backend: str = AUTO
    plain: str = SDPA
    passes_offsets: bool = True

    @property
    def name(self) -> str:
        """The name in transformers' registries: models pass offsets if it contains ``flash``."""
        choices = [self.backend] * (self.backend != AUTO) + ["over", self.plain] * (self.plain != SDPA)
        if self.passes_offsets:
            return "_".join(["omnitrain_flash", *choices])
        return "_".join(["omnitrain", *choices]).replace("flash", "fa")


ATTENTION_NAME = Implementation().name

_registered: dict[str, Implementation] = {}


def use_omnitrain_attention(model: torch.nn.Module, backend: str = AUTO) -> tuple[str, ...]:
    """Make every transformers module in ``model`` attend through :func:`omnitrain_attention`.

    The choice is stored in the configs, so models that share a config object share the choice. A later call changes it.
    ``backend`` is for packed sequences: ``auto``, ``flash``, ``varlen``, ``sdpa``, ``flex`` or ``reference``; any other
    is a UserError. Returns the classes of models that keep their own attention, because their code does not use
    transformers' ``AttentionInterface``; they do not keep packed samples apart.
    """
    if backend not in backend_names():
        raise UserError(f"no attention backend {backend!r}; expected one of {', '.join(backend_names())}")
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    fixed = [module for module in models if not takes_attention(module)]
    fixed_configs = {id(module.config) for module in fixed}
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if attention_of(config) is not None and id(config) not in fixed_configs:
            # With "flash" in the name, transformers would refuse chunked attention, which a spec describes exactly.
            passes_offsets = config_value(config, "attention_chunk_size") is None
            implementation = Implementation(backend, plain_implementation(config), passes_offsets)
            set_attention(config, _register(implementation))
    return tuple(sorted({type(module).__name__ for module in fixed}))


def _register(implementation: Implementation) -> str:
    name, backend, plain = implementation.name, implementation.backend, implementation.plain
    _registered[name] = implementation
    AttentionInterface.register(name, partial(omnitrain_attention, backend=backend, implementation=plain))
    AttentionMaskInterface.register(name, partial(omnitrain_mask, implementation=plain))
    return name


def plain_implementation(config: Any) -> str:
    """Return transformers' implementation that ``config`` uses for unpacked input."""
    current = attention_of(config)
    assert current is not None
    return _registered[current].plain if current in _registered else current


def _known_inside_a_packed_sequence(find: SamplesOf) -> SamplesOf:
    """Skip transformers' search for samples in positions, which waits for the device, inside a packed sequence."""

    @wraps(find)
    def found(position_ids: Tensor) -> Tensor | None:
        packed = packed_sequence()
        return None if packed is not None and position_ids.shape == (1, packed.num_local_tokens) else find(position_ids)

    return found


def _not_of_ours(load: Callable[..., Any]) -> Callable[..., Any]:
    """Skip transformers' import of an attention package for omnitrain's names, which a config may already have."""

    @wraps(load)
    def loaded(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        return None if implementation in _registered else load(implementation, *args, **kwargs)

    return loaded


modeling_utils.lazy_import_flash_attention = _not_of_ours(modeling_utils.lazy_import_flash_attention)
masking_utils.find_packed_sequence_indices = _known_inside_a_packed_sequence(masking_utils.find_packed_sequence_indices)
for _passes_offsets in (True, False):
    _register(Implementation(passes_offsets=_passes_offsets))

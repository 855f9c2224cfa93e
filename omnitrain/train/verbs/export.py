"""Export the foundation of a saved model as a transformers model."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import torch
from transformers import PreTrainedModel

from omnitrain.checkpoint.disk import set_default_modes
from omnitrain.errors import UserError
from omnitrain.models.adapters.lora import merge_lora
from omnitrain.parallel.fsdp.units import stays_fp32
from omnitrain.train.build_from_recipe import load_checkpoint
from omnitrain.train.metrics.display import quiet_libraries, show_unused

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export(checkpoint: str | Path, folder: str | Path, dtype: str | None = None) -> list[str]:
    """Write the files that ``from_pretrained`` of transformers reads: weights, config, tokenizer or processor.

    LoRA adapters are merged into the weights.

    Args:
        checkpoint: folder of a run (its newest checkpoint is used), or of a saved omni model.
        folder: a new folder.
        dtype: dtype of the weights, ``float32``, ``bfloat16`` or ``float16``; None: as saved. Tensors that the model's
            class keeps in fp32, such as routing biases of experts, stay fp32.

    Returns:
        Names of the attached components, which are not exported because transformers has no class for them.

    Raises:
        UserError: the model does not exist, the folder has files, or the dtype is unknown.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{str(folder)!r} already has files; use a new folder")
    if dtype is not None and dtype not in _DTYPES:
        raise UserError(f"dtype: found {dtype!r}; expected one of {', '.join(_DTYPES)}")
    quiet_libraries()
    model, processor = load_checkpoint(checkpoint)
    merge_lora(model, None if dtype is None else _DTYPES[dtype])
    if dtype is not None:
        _cast(model.foundation, _DTYPES[dtype])
    show_unused(model.config.unused_tensors)
    model.foundation.save_pretrained(folder)
    set_default_modes(folder.glob("*.safetensors"))
    processor.renderer.save_pretrained(folder)
    return sorted([*model.encoders, *model.decoders])


def _cast(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast weights and buffers, except those that the model keeps in fp32, as transformers does when it loads them."""
    stays = stays_fp32(model)
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_floating_point() and not stays(name):
            tensor.data = tensor.data.to(dtype)

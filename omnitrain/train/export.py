"""The foundation of a saved model as a model of plain transformers."""

from __future__ import annotations

from pathlib import Path

import torch

from omnitrain.errors import UserError
from omnitrain.train.display import quiet_libraries
from omnitrain.train.setup import load_checkpoint


def export(checkpoint: str | Path, folder: str | Path, dtype: str | None = None) -> list[str]:
    """Write what ``from_pretrained`` of transformers reads: weights, config, tokenizer or processor.

    Args:
        checkpoint: folder of a run (its newest checkpoint is taken), or of a saved omni model.
        folder: a new one.
        dtype: of the weights, ``bfloat16`` for one; None: as saved.

    Returns:
        Attached components, which no class of transformers has; they are left out.

    Raises:
        UserError: no such model, a folder that holds files, an unknown dtype, or LoRA adapters beside the foundation.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{str(folder)!r} holds files already; name a new folder")
    kind = None if dtype is None else getattr(torch, dtype, None)
    if dtype is not None and not (isinstance(kind, torch.dtype) and kind.is_floating_point):
        raise UserError(f"dtype: found {dtype!r}; expected float32, bfloat16 or float16")
    quiet_libraries()
    model, processor = load_checkpoint(checkpoint)
    if any(name.startswith("foundation.") for name in model.adapter_names):
        raise UserError(
            f"the foundation at {str(checkpoint)!r} has LoRA adapters, which are in files of peft: load the model that "
            "was adapted, then PeftModel.from_pretrained(model, CHECKPOINT/adapters/foundation).merge_and_unload()"
        )
    if kind is not None:
        model.foundation.to(kind)
    model.foundation.save_pretrained(folder)
    processor.renderer.save_pretrained(folder)
    return sorted([*model.encoders, *model.decoders])

"""The foundation of a saved model as a model of plain transformers."""

from __future__ import annotations

from pathlib import Path

import torch

from omnitrain.errors import UserError
from omnitrain.train.display import quiet_libraries
from omnitrain.train.setup import load_checkpoint

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export(checkpoint: str | Path, folder: str | Path, dtype: str | None = None) -> list[str]:
    """Write what ``from_pretrained`` of transformers reads: weights, config, tokenizer or processor.

    Args:
        checkpoint: folder of a run (its newest checkpoint is taken), or of a saved omni model.
        folder: a new one.
        dtype: of the weights, ``float32``, ``bfloat16`` or ``float16``; None: as saved.

    Returns:
        Attached components, which no class of transformers has; they are left out.

    Raises:
        UserError: no such model, a folder that holds files, an unknown dtype, or LoRA adapters beside the foundation.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{str(folder)!r} holds files already; name a new folder")
    if dtype is not None and dtype not in _DTYPES:
        raise UserError(f"dtype: found {dtype!r}; expected one of {', '.join(_DTYPES)}")
    quiet_libraries()
    model, processor = load_checkpoint(checkpoint)
    if any(name.startswith("foundation.") for name in model.adapter_names):
        raise UserError(
            f"the foundation at {str(checkpoint)!r} has LoRA adapters, which are in files of peft: load the model that "
            "was adapted, then PeftModel.from_pretrained(model, CHECKPOINT/adapters/foundation).merge_and_unload()"
        )
    if dtype is not None:
        model.foundation.to(_DTYPES[dtype])
    model.foundation.save_pretrained(folder)
    processor.renderer.save_pretrained(folder)
    return sorted([*model.encoders, *model.decoders])

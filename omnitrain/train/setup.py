"""From a recipe to a model and its processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from omnitrain.checkpoint.store import newest_checkpoint
from omnitrain.data.processor import OmniProcessor
from omnitrain.errors import UserError
from omnitrain.models.build import build_omni_model
from omnitrain.models.freeze import freeze
from omnitrain.models.hf import require_folder
from omnitrain.models.omni import OmniModel
from omnitrain.ops.backends import choose
from omnitrain.ops.cross_entropy import CROSS_ENTROPY
from omnitrain.ops.fuse import FusedOp, fuse_ops
from omnitrain.recipe import ChatFormat, HFSource, Ops, Recipe


def build_from_recipe(recipe: Recipe, init_device: str = "cpu") -> tuple[OmniModel, OmniProcessor]:
    """The model of a recipe, frozen as it says, and its processor.

    Args:
        recipe: the recipe; fresh weights follow from its seed.
        init_device: ``meta`` makes shapes only.

    Raises:
        UserError: anything in the recipe that does not fit together.
    """
    if recipe.model.checkpoint is not None:
        return load_checkpoint(recipe.model.checkpoint, recipe.model.freeze, init_device, recipe.data.chat)
    torch.manual_seed(recipe.train.seed)
    assert recipe.model.foundation is not None
    model = build_omni_model(
        foundation=_source(recipe.model.foundation),
        encoders=dict(recipe.model.encoders),
        decoders=dict(recipe.model.decoders),
        init_device=init_device,
        torch_dtype=torch.float32,
    )
    tokenizer = _tokenizer(recipe)
    readers, writers = model.media_adapters()
    chat = recipe.data.chat or ChatFormat()
    _add_chat_tokens(tokenizer, chat, {m for a in (*readers.values(), *writers.values()) for m in a.modalities})
    _fit_vocabulary(model, tokenizer)
    freeze(model, recipe.model.freeze)
    return model, OmniProcessor(tokenizer, chat, readers, writers)


def load_checkpoint(
    folder: str | Path,
    frozen: list[str] | None = None,
    init_device: str = "cpu",
    chat: ChatFormat | None = None,
) -> tuple[OmniModel, OmniProcessor]:
    """A saved model and its processor.

    Args:
        folder: of a run (its newest checkpoint is taken), or written by ``save_pretrained`` of both.
        frozen: components that do not train.
        init_device: ``meta`` makes shapes only.
        chat: replaces the saved chat format.

    Raises:
        UserError: not such a folder.
        WeightsError: tensors missing, left over or misshapen.
    """
    folder = newest_checkpoint(folder)
    model = build_omni_model(weights_path=str(folder), init_device=init_device)
    freeze(model, frozen or [])
    processor = OmniProcessor.from_pretrained(folder, *model.media_adapters())
    if chat is not None:
        processor = OmniProcessor(processor.tokenizer, chat, *model.media_adapters())
    return model, processor


def use_ops(model: OmniModel, ops: Ops) -> dict[str, dict[str, FusedOp]]:
    """Run the foundation and the encoders by the backends of ``model.ops``, and every loss.

    Media tokenizers keep their own code: another rounding would make other codes.

    Returns:
        Component name -> what was done there.

    Raises:
        UserError: a backend cannot run on the model's device.
    """
    choose("cross_entropy", CROSS_ENTROPY, ops.cross_entropy, model.device)
    for part in (model, *model.decoders.values()):
        part.loss_backend = ops.cross_entropy
    wanted = ops.model_dump(exclude={"cross_entropy"})
    return {name: fuse_ops(part, wanted) for name, part in {"foundation": model.foundation, **model.encoders}.items()}


def _source(source: HFSource) -> Any:
    return source.path if source.path is not None else source.config


def _tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    assert recipe.model.foundation is not None
    path = recipe.model.tokenizer or recipe.model.foundation.path
    if path is None:
        raise UserError("model.tokenizer: a foundation made from a config needs the path of a text tokenizer")
    require_folder(path, "text tokenizer")
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"model.tokenizer: no tokenizer at {path!r}: {str(error).splitlines()[0]}") from None


def _add_chat_tokens(tokenizer: PreTrainedTokenizerBase, chat: ChatFormat, modalities: set[str]) -> None:
    """The end of a message and the starts of media become special tokens where the tokenizer does not have them."""
    wanted = [chat.end, *(getattr(chat, modality) for modality in sorted(modalities))]
    new = [token for token in wanted if len(tokenizer(token, add_special_tokens=False)["input_ids"]) != 1]
    tokenizer.add_tokens(new, special_tokens=True)


def _fit_vocabulary(model: OmniModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Grow the foundation's embeddings where the tokenizer has more tokens than they have rows."""
    rows = model.foundation.get_input_embeddings().weight.size(0)
    if len(tokenizer) > rows:
        model.foundation.resize_token_embeddings(len(tokenizer), mean_resizing=model.device.type != "meta")
        model.config.foundation = {**(model.config.foundation or {}), "vocab_size": len(tokenizer)}

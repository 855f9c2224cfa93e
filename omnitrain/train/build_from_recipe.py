"""From a recipe to a model and its processor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from omnitrain.checkpoint.store import newest_checkpoint, require_as_saved
from omnitrain.data.chat_renderer import ChatRenderer
from omnitrain.data.native import NativeInputs
from omnitrain.data.processor import OmniProcessor
from omnitrain.data.renderer import Renderer
from omnitrain.data.template_renderer import TemplateRenderer
from omnitrain.data.text_tokenizer import load_tokenizer, require_vocabulary
from omnitrain.errors import ModelError, UserError
from omnitrain.models.adapters.lora import add_lora
from omnitrain.models.contract.checks_backend import require_attention_backend
from omnitrain.models.hf.load import as_dict, require_folder
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.freeze import freeze
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.attention import AUTO, require_trainable, use_omnitrain_attention
from omnitrain.ops.cpu.unread_rows import UNREAD_ROWS
from omnitrain.ops.experts import EXPERTS, experts_in, use_omnitrain_experts
from omnitrain.ops.fused.install import FUSED, FusedOp, backends_of, fuse_ops, has_operation
from omnitrain.ops.loss.cross_entropy import CROSS_ENTROPY
from omnitrain.ops.registry import choose
from omnitrain.parallel.adapter_plan import adapters_for
from omnitrain.recipe import ChatFormat, Decoder, Encoder, HFSource, Model, Ops, ParallelPlan, Recipe
from omnitrain.recipe.effect import Idle, idle_problems
from omnitrain.recipe.parallel import FOUNDATION
from omnitrain.train.run_state.state import OPTIMIZER


def build_from_recipe(recipe: Recipe, init_device: str = "cpu") -> tuple[OmniModel, OmniProcessor]:
    """The model of a recipe, frozen as it says, with the adapters that its plan asks for, and its processor.

    Args:
        recipe: the recipe; fresh weights follow from its seed.
        init_device: ``meta`` makes shapes only.

    Raises:
        UserError: anything in the recipe that does not fit together.
    """
    parts = recipe.model
    if parts.checkpoint is not None:
        model, processor = load_checkpoint(parts.checkpoint, parts.freeze, init_device, recipe.data.chat, torch.float32)
        _add_adapters(model, recipe.parallel)
        return model, processor
    torch.manual_seed(recipe.train.seed)
    try:
        model = _build(parts, parts.encoders, parts.decoders, init_device)
    except ModelError as error:
        raise UserError(f"{_refused_part(parts)}: {error}") from error
    except UserError:
        raise
    except Exception as error:  # each HF class refuses in its own way
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{_refused_part(parts)}: cannot be built from this config: {reason}") from error
    readers, writers = model.media_adapters()
    attached = {modality for adapter in (*readers.values(), *writers.values()) for modality in adapter.modalities}
    renderer = _renderer(recipe, model, attached)
    assert parts.foundation is not None
    _fit_vocabulary(model, renderer.tokenizer, parts.foundation)
    freeze(model, recipe.model.freeze)
    _add_adapters(model, recipe.parallel)
    return model, OmniProcessor(renderer, readers, writers)


def load_checkpoint(
    folder: str | Path,
    frozen: list[str] | None = None,
    init_device: str = "cpu",
    chat: ChatFormat | None = None,
    torch_dtype: torch.dtype | None = None,
    *,
    checked: bool = True,
) -> tuple[OmniModel, OmniProcessor]:
    """A saved model, with its LoRA adapters if it has some, and its processor.

    Args:
        folder: of a run (its newest checkpoint is taken), or written by ``save_pretrained`` of both.
        frozen: components that do not train.
        init_device: ``meta`` makes shapes only.
        chat: replaces the saved chat format.
        torch_dtype: of the weights; None: as saved.
        checked: compare files with their checksums first, if weights are read; not those of an optimizer.

    Raises:
        UserError: not such a folder.
        WeightsError: tensors missing, left over or misshapen.
    """
    folder = newest_checkpoint(folder)
    if checked and init_device != "meta":
        require_as_saved(folder, unread=OPTIMIZER)
    model = build_omni_model(weights_path=str(folder), init_device=init_device, torch_dtype=torch_dtype)
    freeze(model, frozen or [])
    processor = OmniProcessor.from_pretrained(folder, *model.media_adapters(), model.native_inputs)
    if chat is not None and isinstance(processor.renderer, ChatRenderer):
        processor = OmniProcessor(ChatRenderer(processor.tokenizer, chat), *model.media_adapters())
    return model, processor


def _add_adapters(model: OmniModel, plan: ParallelPlan) -> None:
    """Before operations are put in from outside, as where a checkpoint has adapters: both round alike.

    A plan that does not fit is refused where it is applied, with all that is wrong.
    """
    adapters, problems = adapters_for(model, plan)
    if not problems:
        add_lora(model, adapters)


def _build(
    parts: Model, encoders: Mapping[str, Encoder], decoders: Mapping[str, Decoder], init_device: str
) -> OmniModel:
    assert parts.foundation is not None
    return build_omni_model(
        foundation=_source(parts.foundation),
        encoders=dict(encoders),
        decoders=dict(decoders),
        init_device=init_device,
        torch_dtype=torch.float32,
    )


def _refused_part(parts: Model) -> str:
    """The key of the part that cannot be built, found by building each alone."""
    alone: list[tuple[str, dict[str, Encoder], dict[str, Decoder]]] = [("model.foundation", {}, {})]
    alone += [(f"model.encoders.{name}", {name: encoder}, {}) for name, encoder in parts.encoders.items()]
    alone += [(f"model.decoders.{name}", {}, {name: decoder}) for name, decoder in parts.decoders.items()]
    for key, encoders, decoders in alone:
        try:
            _build(parts, encoders, decoders, "meta")
        except Exception:  # as the whole was: by its HF class, in whatever way
            return key
    return "model"


def require_ops(model: OmniModel, ops: Ops, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse backends of ``model.ops`` that cannot train the model, before anything is written.

    Args:
        model: on any device, ``meta`` too.
        ops: the recipe's ``model.ops`` node.
        device: where the model will train.
        dtype: in which the foundation computes there.

    Raises:
        UserError: every backend that cannot, with the reason and what may be chosen instead, a line each.
    """
    problems, elsewhere = [], {"cross_entropy": CROSS_ENTROPY, "unread_rows": UNREAD_ROWS, "experts": EXPERTS}
    for name, wanted in ops.model_dump(exclude={"attention"}).items():
        try:
            choose(name, elsewhere[name] if name in elsewhere else backends_of(name), wanted, device)
        except UserError as error:
            problems.append(f"model.ops.{error}")
    if ops.attention != AUTO:
        try:
            require_trainable(ops.attention, device, dtype)
            require_attention_backend(model.runner, ops.attention, device, dtype)
        except UserError as error:
            problems.append(f"model.ops.attention: {error}")
    problems += idle_problems(ops, _idle_ops(model), "model.ops")
    if problems:
        raise UserError("\n".join(problems))


def _idle_ops(model: OmniModel) -> Iterator[Idle]:
    """Operations that neither the foundation nor an encoder has."""
    contract, parts = model.runner.contract, [model.foundation, *model.encoders.values()]
    for name in FUSED:
        if not any(has_operation(part, name) for part in parts):
            yield Idle(name, "but no module of the model computes that in a form that could be replaced; remove it")
    if not any(True for part in parts for _ in experts_in(part)):
        yield Idle("experts", "but the model has none; remove it")
    if contract.attention != "omnitrain" and not model.encoders:
        yield Idle("attention", f"but {type(model.foundation).__name__} attends by code of its own; remove it")
    if not contract.row_local:
        yield Idle("unread_rows", "but nothing of the model works row by row behind its last attention; remove it")
    if contract.head != "inside" and not model.decoders:
        yield Idle("cross_entropy", "but the model makes its loss from logits by itself; remove it")


def use_ops(model: OmniModel, ops: Ops, device: torch.device, dtype: torch.dtype) -> dict[str, dict[str, FusedOp]]:
    """Run the foundation and the encoders by the backends of ``model.ops``, and every loss.

    Media tokenizers keep their own code: another rounding would make other codes.

    Args:
        model: on any device: sharding will move it.
        ops: the recipe's ``model.ops`` node.
        device: where the model will train.
        dtype: in which the foundation computes there.

    Returns:
        Component name -> what was done there.

    Raises:
        UserError: a backend cannot train the model on its device.
    """
    require_ops(model, ops, device, dtype)
    for part in (model.runner, *model.decoders.values()):
        part.loss_backend = ops.cross_entropy
    for reader in model.encoders.values():
        use_omnitrain_attention(reader, ops.attention)
    if model.runner.contract.attention == "omnitrain":
        use_omnitrain_attention(model.foundation, ops.attention)
    wanted = ops.model_dump(include=set(FUSED))
    done = {
        name: fuse_ops(part, wanted, device)
        for name, part in {"foundation": model.foundation, **model.encoders}.items()
    }
    if choose("unread_rows", UNREAD_ROWS, ops.unread_rows, device).run():
        done["foundation"]["unread_rows"] = FusedOp("skip", model.runner.skip_unread_rows())
    for name, part in {"foundation": model.foundation, **model.encoders}.items():
        found = use_omnitrain_experts(part, ops.experts)
        done[name]["experts"] = FusedOp(choose("experts", EXPERTS, ops.experts, device).name, found)
    return done


def _source(source: HFSource) -> Any:
    return source.path if source.path is not None else source.config


def _renderer(recipe: Recipe, model: OmniModel, attached: set[str]) -> Renderer:
    """The chat format: of the foundation's own processor where it has a say, else the recipe's."""
    data = recipe.data
    found = _by_processor(recipe, _of_whole_rows(recipe, model.native_inputs))
    starts = data.chat or ChatFormat()
    marks = [getattr(starts, modality) for modality in sorted(attached)]
    if isinstance(found, TemplateRenderer):
        _add_tokens(found.tokenizer, marks)
        return found
    tokenizer = _tokenizer(recipe)
    if data.chat is None and tokenizer.chat_template:
        _add_tokens(tokenizer, marks)
        return TemplateRenderer(tokenizer, NativeInputs({}, refused=found), starts=starts)
    _add_tokens(tokenizer, [starts.end, *marks])
    return ChatRenderer(tokenizer, starts, refused=found)


def _by_processor(recipe: Recipe, native: NativeInputs) -> TemplateRenderer | Mapping[str, str]:
    """The format of the HF processor that is named, or of the foundation's own; without one: modality -> why not."""
    data, source = recipe.data, recipe.model.foundation
    assert source is not None
    is_asked = data.processor or data.audio_in_video or any(data.processor_arguments.model_dump().values())
    is_free = data.chat is None and recipe.model.tokenizer is None
    is_own = native.placeholders or (native.in_forward and is_free)
    reason = "its own forward needs the HF processor; set data.processor"
    if (named := data.processor or (source.path if is_own else None)) is not None:
        try:
            return TemplateRenderer.from_recipe(data, named, native)
        except UserError as error:
            if native.placeholders or is_asked:
                raise
            reason = str(error)
    return {**native.refused, **dict.fromkeys(native.in_forward, reason)}


def _of_whole_rows(recipe: Recipe, native: NativeInputs) -> NativeInputs:
    """Without what the foundation's own forward reads, where ranks share its sequences: they have parts of a row."""
    plan = recipe.parallel.of(FOUNDATION)
    if (plan.ulysses or 1) * (plan.cp or 1) == 1:
        return native
    fact = "its own forward reads that over whole rows, and ranks share its sequences; set ulysses and cp to 1"
    return native.without_forward(dict.fromkeys(native.in_forward, fact))


def _tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    assert recipe.model.foundation is not None
    path = recipe.model.tokenizer or recipe.model.foundation.path
    if path is None:
        raise UserError("model.tokenizer: a foundation made from a config needs the path of a text tokenizer")
    require_folder(path, "text tokenizer")
    return load_tokenizer(path, "model.tokenizer")


def _add_tokens(tokenizer: PreTrainedTokenizerBase, wanted: list[str]) -> None:
    """Ends of messages and starts of media become special tokens where the tokenizer does not have them."""
    new = [token for token in wanted if len(tokenizer(token, add_special_tokens=False)["input_ids"]) != 1]
    tokenizer.add_tokens(new, special_tokens=True)


def _fit_vocabulary(model: OmniModel, tokenizer: PreTrainedTokenizerBase, source: HFSource) -> None:
    """Grow the foundation's embeddings where the tokenizer has more tokens than they have rows.

    Far fewer tokens are an error where the embeddings are pretrained; fresh ones mean nothing yet.
    """
    rows = model.foundation.get_input_embeddings().weight.size(0)
    if source.path is not None:
        require_vocabulary(tokenizer, rows, source.path)
    if len(tokenizer) > rows:
        model.foundation.resize_token_embeddings(len(tokenizer), mean_resizing=model.device.type != "meta")
        model.config.foundation = as_dict(model.foundation.config)

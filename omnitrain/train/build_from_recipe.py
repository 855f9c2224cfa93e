"""Build the model and the processor of a recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from omnitrain.checkpoint.optimizer import load_averages
from omnitrain.checkpoint.store import newest_checkpoint, require_as_saved
from omnitrain.data.chat.text_tokenizer import load_tokenizer, require_vocabulary
from omnitrain.data.render.native import NativeInputs
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.render.renderer import ChatRenderer, Renderer
from omnitrain.data.render.template_renderer import TemplateRenderer
from omnitrain.errors import ModelError, UserError
from omnitrain.models.adapters.lora import add_lora
from omnitrain.models.contract.check import require_attention_backend
from omnitrain.models.hf.load import as_dict, require_folder
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.model import OmniModel
from omnitrain.models.omni.named_parameters import freeze
from omnitrain.ops.attention.entry import AUTO, require_trainable
from omnitrain.ops.attention.install import use_omnitrain_attention
from omnitrain.ops.cpu.unread_rows import UNREAD_ROWS
from omnitrain.ops.experts.entry import EXPERTS
from omnitrain.ops.experts.install import use_omnitrain_experts
from omnitrain.ops.experts.weights import experts_in
from omnitrain.ops.fused.install import FUSED, FusedOp, backends_of, fuse_ops, has_operation
from omnitrain.ops.loss.cross_entropy import CROSS_ENTROPY
from omnitrain.ops.loss.token_functions import TokenFunction, further_parameters
from omnitrain.ops.registry import choose
from omnitrain.parallel.adapter_plan import adapters_for
from omnitrain.recipe import ChatFormat, Decoder, Encoder, HFSource, Model, Ops, ParallelPlan, Recipe, TeacherSource
from omnitrain.recipe.functions import load_function
from omnitrain.recipe.parallel import FOUNDATION
from omnitrain.recipe.strict import Idle, idle_problems
from omnitrain.recipe.suggest import hint
from omnitrain.recipe.train import Train
from omnitrain.train.run_state.snapshot import EMA_FOLDER, OPTIMIZER


def build_from_recipe(recipe: Recipe, init_device: str = "cpu") -> tuple[OmniModel, OmniProcessor]:
    """Build a recipe's model (on ``meta``: shapes alone) and processor; UserError: parts do not fit."""
    parts = recipe.model
    if parts.checkpoint is not None:
        model, processor = load_checkpoint(
            parts.checkpoint,
            parts.freeze,
            init_device,
            recipe.data.chat,
            torch.float32,
            teachers=parts.teachers,
            plan=recipe.parallel,
        )
        _require_same_tokens(parts.teachers, processor.tokenizer)
        _add_adapters(model, recipe.parallel)
        return model, processor
    model = _build_parts(recipe, init_device)
    readers, writers = model.media_adapters()
    attached = {modality for adapter in (*readers.values(), *writers.values()) for modality in adapter.modalities}
    renderer, added = _renderer(recipe, model, attached)
    assert parts.foundation is not None
    _fit_vocabulary(model, renderer.tokenizer, parts.foundation, added)
    _require_same_tokens(parts.teachers, renderer.tokenizer)
    freeze(model, recipe.model.freeze)
    _add_adapters(model, recipe.parallel)
    return model, OmniProcessor(renderer, readers, writers)


def build_without_tokenizer(recipe: Recipe) -> OmniModel:
    """Build a recipe's model on ``meta`` as :func:`build_from_recipe` does, with the vocabulary of its config."""
    if recipe.model.checkpoint is not None:
        parts = recipe.model
        model = build_omni_model(
            weights_path=parts.checkpoint, teachers=parts.teachers, init_device="meta", torch_dtype=torch.float32
        )
    else:
        model = _build_parts(recipe, "meta")
    freeze(model, recipe.model.freeze)
    _add_adapters(model, recipe.parallel)
    return model


def _build_parts(recipe: Recipe, init_device: str) -> OmniModel:
    """Build a model from its parts; an error names the key of the part that cannot be built."""
    parts = recipe.model
    torch.manual_seed(recipe.train.seed)
    try:
        return _build(parts, parts.encoders, parts.decoders, parts.teachers, init_device)
    except ModelError as error:
        raise UserError(f"{_refused_part(parts)}: {error}") from error
    except UserError:
        raise
    except Exception as error:  # each HF class fails differently
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{_refused_part(parts)}: this config cannot be built: {reason}") from error


def load_checkpoint(
    folder: str | Path,
    frozen: list[str] | None = None,
    init_device: str = "cpu",
    chat: ChatFormat | None = None,
    torch_dtype: torch.dtype | None = None,
    *,
    teachers: Mapping[str, TeacherSource] | None = None,
    checked: bool = True,
    averaged: bool = False,
    plan: ParallelPlan | None = None,
) -> tuple[OmniModel, OmniProcessor]:
    """Load a saved model, with its LoRA adapters if it has any, and its processor.

    ``folder``: a run, whose newest checkpoint is loaded, or what ``save_pretrained`` wrote. ``frozen``: components to
    freeze. ``chat`` replaces the saved format. ``teachers``: component -> language model to add. ``checked``: verify
    the checksums of files, but the optimizer's, before reading. ``averaged``: load the averages of ``train.ema``.
    ``plan``: of the run; media that it cannot train are refused in rows.
    Raises UserError, WeightsError: not such a folder, or tensors are missing, unexpected or of the wrong shape.
    """
    folder = newest_checkpoint(folder)
    if checked and init_device != "meta":
        require_as_saved(folder, unread=OPTIMIZER)
    model = build_omni_model(
        weights_path=str(folder), teachers=teachers, init_device=init_device, torch_dtype=torch_dtype
    )
    if averaged:
        if not (folder / EMA_FOLDER).is_dir():
            raise UserError(f"{folder} has no averages of its weights; only a run with `train.ema` keeps them")
        load_averages(model, folder / EMA_FOLDER)
    freeze(model, frozen or [])
    native = trainable_media(plan or ParallelPlan(), model.native_inputs)
    processor = OmniProcessor.from_pretrained(folder, *model.media_adapters(), native)
    if chat is not None and isinstance(processor.renderer, ChatRenderer):
        processor = OmniProcessor(ChatRenderer(processor.tokenizer, chat), *model.media_adapters())
    return model, processor


def _add_adapters(model: OmniModel, plan: ParallelPlan) -> None:
    """Add adapters before operations are replaced, as for a checkpoint with them, so both round alike."""
    adapters, problems = adapters_for(model, plan)
    if not problems:
        add_lora(model, adapters)


def _build(
    parts: Model,
    encoders: Mapping[str, Encoder],
    decoders: Mapping[str, Decoder],
    teachers: Mapping[str, TeacherSource],
    init_device: str,
) -> OmniModel:
    assert parts.foundation is not None
    return build_omni_model(
        foundation=parts.foundation.path if parts.foundation.path is not None else parts.foundation.config,
        encoders=dict(encoders),
        decoders=dict(decoders),
        teachers=teachers,
        init_device=init_device,
        torch_dtype=torch.float32,
    )


def _refused_part(parts: Model) -> str:
    """Return the key of the component that cannot be built, by building each alone."""
    alone: list[tuple[str, dict[str, Encoder], dict[str, Decoder], dict[str, TeacherSource]]]
    alone = [("model.foundation", {}, {}, {})]
    alone += [(f"model.encoders.{name}", {name: encoder}, {}, {}) for name, encoder in parts.encoders.items()]
    alone += [(f"model.decoders.{name}", {}, {name: decoder}, {}) for name, decoder in parts.decoders.items()]
    alone += [(f"model.teachers.{name}", {}, {}, {name: source}) for name, source in parts.teachers.items()]
    for key, encoders, decoders, teachers in alone:
        try:
            _build(parts, encoders, decoders, teachers, "meta")
        except Exception:  # each HF class fails differently
            return key
    return "model"


def require_ops(model: OmniModel, ops: Ops, device: torch.device, dtype: torch.dtype) -> None:
    """Raise UserError with a line for each backend of ``model.ops`` that cannot train on ``device`` in ``dtype``."""
    problems, other_backends = [], {"cross_entropy": CROSS_ENTROPY, "unread_rows": UNREAD_ROWS, "experts": EXPERTS}
    for name, wanted in ops.model_dump(exclude={"attention"}).items():
        try:
            choose(name, other_backends[name] if name in other_backends else backends_of(name), wanted, device)
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
        raise UserError(*problems)


def _idle_ops(model: OmniModel) -> Iterator[Idle]:
    """Yield the operations that neither the foundation nor an encoder has."""
    contract, parts = model.runner.contract, [model.foundation, *model.encoders.values()]
    for name in FUSED:
        if not any(has_operation(part, name) for part in parts):
            yield Idle(name, "but no module of the model computes it in a form that can be replaced; remove it")
    if not any(True for part in parts for _ in experts_in(part)):
        yield Idle("experts", "but the model has no experts; remove it")
    if contract.attention != "omnitrain" and not model.encoders:
        yield Idle("attention", f"but {type(model.foundation).__name__} uses its own attention code; remove it")
    if not contract.tokenwise:
        yield Idle("unread_rows", "but no module after the model's last attention works token by token; remove it")
    if contract.head != "inside" and not model.decoders:
        yield Idle("cross_entropy", "but the model computes its loss from logits in its own code; remove it")


def use_ops(model: OmniModel, ops: Ops, device: torch.device, dtype: torch.dtype) -> dict[str, dict[str, FusedOp]]:
    """Install the backends of ``model.ops``, not in media tokenizers; return component -> operation -> its use."""
    require_ops(model, ops, device, dtype)
    for part in (model.runner, *model.decoders.values()):
        part.loss_backend = ops.cross_entropy
    for name, reader in model.encoders.items():
        if name not in model.teachers or reader.runner.contract.attention == "omnitrain":
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
        num_layers = use_omnitrain_experts(part, ops.experts)
        done[name]["experts"] = FusedOp(choose("experts", EXPERTS, ops.experts, device).name, num_layers)
    return done


def use_own_functions(model: OmniModel, train: Train) -> None:
    """Install the user's losses and metrics; UserError: one cannot be loaded or lacks what it reads."""
    losses = {name: load_function(function, f"train.losses.{name}") for name, function in train.losses.items()}
    metrics = {name: load_function(function, f"train.metrics.{name}") for name, function in train.metrics.items()}
    _require_teachers(model, losses, metrics)
    install_losses(model, losses, "train.losses")
    heads = _heads_with_functions(model, list(_heads(model)) if metrics else [], "train.metrics")
    for name, head in heads.items():
        head.token_metrics = {
            metric: function
            for metric, function in metrics.items()
            if name == "text" or further_parameters(function).keys().isdisjoint(model.teachers)
        }


def install_losses(model: OmniModel, losses: Mapping[str, TokenFunction], key: str) -> None:
    """Let heads compute losses of the user; UserError for ``key``: a head is not there, or computes its loss alone."""
    for name, head in _heads_with_functions(model, list(losses), key).items():
        head.loss_function = losses[name]


def _heads(model: OmniModel) -> dict[str, Any]:
    return {"text": model.runner, **model.decoders}


def _heads_with_functions(model: OmniModel, names: list[str], key: str) -> dict[str, Any]:
    """The heads of these names, each of which calls a function with its logits and labels."""
    heads = _heads(model)
    for name in names:
        if name not in heads:
            raise UserError(f"{key}: found a head {name!r}; {hint(name, heads)}")
        if not hasattr(heads[name], "loss_function"):
            raise UserError(
                f"{key}: {type(heads[name]).__name__} ({name}) computes its loss by itself; change its lm_head"
            )
    return {name: heads[name] for name in names}


def _require_teachers(
    model: OmniModel, losses: Mapping[str, TokenFunction], metrics: Mapping[str, TokenFunction]
) -> None:
    """Check the parameters of the user's functions: those after logits and labels are names of teachers."""
    named = [(f"train.losses.{head}", head, function) for head, function in losses.items()]
    named += [(f"train.metrics.{name}", "text", function) for name, function in metrics.items()]
    problems, unread = [], {*model.teachers}.difference(model.compared)
    for key, head, function in named:
        known = [n for n, sources in model.teachers.items() if sources is None] if head == "text" else []
        for name, has_default in further_parameters(function).items():
            unread -= {name} & {*known}
            if name not in known and not has_default:
                allowed = (
                    f"a teacher of the text's loss: {hint(name, known)}" if known else "none, as it reads no teacher"
                )
                problems.append(f"{key}: found a parameter {name!r} after logits and labels; expected {allowed}")
    problems += [
        f"model.teachers.{name}: no function of `train.losses` or `train.metrics` has a parameter {name!r} after "
        "logits and labels, so nothing reads its hidden states; add it, set its `divergence`, or remove the teacher"
        for name in sorted(unread)
    ]
    if problems:
        raise UserError(*problems)


def _renderer(recipe: Recipe, model: OmniModel, attached: set[str]) -> tuple[Renderer, list[int]]:
    """Return the HF processor's chat format if one is used, else the recipe's; and ids of added tokens."""
    data = recipe.data
    by_processor = _by_processor(recipe, trainable_media(recipe.parallel, model.native_inputs))
    starts = data.chat or ChatFormat()
    start_tokens = [*(getattr(starts, modality) for modality in sorted(attached)), *starts.starts.values()]
    if isinstance(by_processor, TemplateRenderer):
        return by_processor, _add_tokens(by_processor.tokenizer, start_tokens)
    tokenizer = _tokenizer(recipe)
    if data.chat is None and tokenizer.chat_template:
        added = _add_tokens(tokenizer, start_tokens)
        return TemplateRenderer(tokenizer, NativeInputs(refused=by_processor), starts=starts), added
    added = _add_tokens(tokenizer, [starts.end, *start_tokens])
    return ChatRenderer(tokenizer, starts, refused=by_processor), added


def _by_processor(recipe: Recipe, native: NativeInputs) -> TemplateRenderer | Mapping[str, str]:
    """Return the format of the HF processor of the recipe or foundation, or else modality -> why there is none."""
    data, source = recipe.data, recipe.model.foundation
    assert source is not None
    is_required = data.processor or data.audio_in_video or any(data.processor_arguments.model_dump().values())
    is_free = data.chat is None and recipe.model.tokenizer is None
    uses_foundations = native.placeholders or (native.in_forward and is_free)
    reason = "its own forward needs the HF processor; set data.processor"
    if (path := data.processor or (source.path if uses_foundations else None)) is not None:
        try:
            return TemplateRenderer.from_recipe(data, path, native)
        except UserError as error:
            if native.placeholders or is_required:
                raise
            reason = str(error)
    return {**native.refused, **dict.fromkeys(native.in_forward, reason)}


def trainable_media(plan: ParallelPlan, native: NativeInputs) -> NativeInputs:
    """Refuse ``in_forward`` media if a rank has only a slice of a sequence, and written ones if none has all of it."""
    own = plan.of(FOUNDATION)
    shares = (own.ulysses or 1) * (own.cp or 1) > 1
    if shares or (own.pp or 1) > 1:
        native = native.without_words("no rank has all of its codes; set pp, ulysses and cp to 1")
    if not shares:
        return native
    fact = "its own forward needs whole sequences, but ranks share them; set ulysses and cp to 1"
    return native.without_forward(dict.fromkeys(native.in_forward, fact))


def _tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    assert recipe.model.foundation is not None
    path = recipe.model.tokenizer or recipe.model.foundation.path
    if path is None:
        raise UserError(
            "model.tokenizer: set it to a text tokenizer, because the foundation is built from a config "
            "(`check --no-tokenizer` checks the model without one)"
        )
    require_folder(path, "text tokenizer")
    return load_tokenizer(path, "model.tokenizer")


def _require_same_tokens(teachers: Mapping[str, TeacherSource], tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that each teacher has all tokens of the tokenizer, with the same ids."""
    problems, vocabulary = [], tokenizer.get_vocab()
    for name, teacher in teachers.items():
        path = teacher.path
        of_teacher = load_tokenizer(path, f"model.teachers.{name}").get_vocab()
        others = [token for token, number in vocabulary.items() if of_teacher.get(token) != number]
        if others:
            token = min(others, key=vocabulary.__getitem__)
            problems.append(
                f"model.teachers.{name}: a teacher reads the token ids of the foundation, where {token!r} is "
                f"{vocabulary[token]}; in the tokenizer of {path!r} it is {of_teacher.get(token, 'missing')}; use a "
                "teacher with the same tokenizer"
            )
    if problems:
        raise UserError(*problems)


def _add_tokens(tokenizer: PreTrainedTokenizerBase, wanted: list[str]) -> list[int]:
    """Add texts that are not one token of the tokenizer as special tokens; return their ids."""
    new = [token for token in wanted if len(tokenizer(token, add_special_tokens=False)["input_ids"]) != 1]
    tokenizer.add_tokens(new, special_tokens=True)
    ids: list[int] = tokenizer.convert_tokens_to_ids(new)
    return ids


def _fit_vocabulary(
    model: OmniModel, tokenizer: PreTrainedTokenizerBase, source: HFSource, added: Sequence[int]
) -> None:
    """Grow the foundation's embeddings if the tokenizer has more tokens than rows, and remember which rows are new."""
    rows = model.foundation.get_input_embeddings().weight.size(0)
    if source.path is not None:
        require_vocabulary(tokenizer, rows, source.path)
        model.added_tokens = tuple(sorted({*added, *range(rows, len(tokenizer))}))
    if len(tokenizer) > rows:
        model.foundation.resize_token_embeddings(len(tokenizer), mean_resizing=model.device.type != "meta")
        model.config.foundation = as_dict(model.foundation.config)
        model.fit_heads_of_teachers()

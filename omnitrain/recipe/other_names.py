"""Where a recipe has what HuggingFace's TrainingArguments, TRL and peft call by other names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args, get_origin

from pydantic import BaseModel

from omnitrain.recipe.suggest import nearest

_SAMPLES = "samples of a step, over all ranks; or `train.micro_batches` packs of `data.pack_tokens` tokens"

# Name there -> key of a recipe, or a key with a value, and a remark if the two do not mean the same.
OTHER_NAMES: dict[str, tuple[str, str]] = {
    "max_steps": ("train.steps", ""),
    "num_train_epochs": ("train.epochs", ""),
    "epochs": ("train.epochs", ""),
    "batch_size": ("train.samples_per_step", _SAMPLES),
    "train_batch_size": ("train.samples_per_step", _SAMPLES),
    "per_device_train_batch_size": ("train.samples_per_step", _SAMPLES),
    "gradient_accumulation_steps": (
        "train.micro_batches",
        "packs in a step, over all ranks; a rank accumulates its share",
    ),
    "lr": ("train.optimizer.learning_rate", ""),
    "learning_rate": ("train.optimizer.learning_rate", ""),
    "weight_decay": ("train.optimizer.weight_decay", ""),
    "adam_beta1": ("train.optimizer.betas", "both in a list"),
    "adam_beta2": ("train.optimizer.betas", "both in a list"),
    "adam_epsilon": ("train.optimizer.eps", ""),
    "max_grad_norm": ("train.optimizer.max_grad_norm", ""),
    "warmup_steps": ("train.optimizer.warmup_steps", ""),
    "warmup_ratio": ("train.optimizer.warmup_steps", "a number of steps"),
    "lr_scheduler_type": ("train.optimizer.schedule", ""),
    "optim": ("train.optimizer.kind", "`adamw` or `muon`"),
    "bf16": ("train.precision=bf16", ""),
    "fp16": ("train.precision=bf16", "there is no fp16, which would need loss scaling"),
    "seed": ("train.seed", ""),
    "data_seed": ("train.seed", ""),
    "use_cpu": ("train.device=cpu", ""),
    "no_cuda": ("train.device=cpu", ""),
    "logging_steps": ("train.log_every", ""),
    "save_steps": ("train.save_every", ""),
    "save_strategy": ("train.save_every", "a number of steps"),
    "save_total_limit": ("train.keep_last", ""),
    "eval_steps": ("evaluation.loss_every", "or `evaluation.every`, with generated answers"),
    "eval_strategy": ("evaluation.loss_every", "a number of steps"),
    "evaluation_strategy": ("evaluation.loss_every", "a number of steps"),
    "report_to": ("train.track.to", "a list"),
    "run_name": ("train.track.name", ""),
    "torch_compile": ("train.compile", ""),
    "gradient_checkpointing": ("parallel.default.recompute=full", ""),
    "fsdp": ("parallel.default", ""),
    "deepspeed": ("parallel.default", ""),
    "tp_size": ("parallel.default.tp", ""),
    "dataloader_num_workers": ("data.workers", ""),
    "train_file": ("data.train", "a list of data sets"),
    "dataset_name": ("data.train", "a list of data sets"),
    "max_length": ("data.pack_tokens", "the length of a pack"),
    "max_seq_length": ("data.pack_tokens", "the length of a pack"),
    "cutoff_len": ("data.pack_tokens", "the length of a pack"),
    "model_name_or_path": ("model.foundation", ""),
    "attn_implementation": ("model.ops.attention", ""),
    "lora_r": ("parallel.default.lora.rank", ""),
    "lora_rank": ("parallel.default.lora.rank", ""),
    "lora_alpha": ("parallel.default.lora.alpha", ""),
    "lora_target_modules": ("parallel.default.lora.targets", ""),
    "lora_target": ("parallel.default.lora.targets", ""),
    "target_modules": ("parallel.default.lora.targets", ""),
    "lora_dropout": ("parallel.default.lora.dropout", ""),
    "use_rslora": ("parallel.default.lora.rslora", ""),
    "use_dora": ("parallel.default.lora", "there is no DoRA, whose magnitudes need whole matrices in every forward"),
    "dora": ("parallel.default.lora", "there is no DoRA, whose magnitudes need whole matrices in every forward"),
    "r": ("parallel.default.lora.rank", ""),
    "finetuning_type": ("parallel.default.lora", "for `lora`; without it, all weights train that are not frozen"),
}


def name_here(name: str, root: type[BaseModel], siblings: Sequence[str] = ()) -> str | None:
    """Return the advice for HuggingFace's ``name`` of a key; None: it has no such name, or ``root`` is no recipe.

    ``siblings`` are the keys of the node in which it was found.
    """
    key, remark = OTHER_NAMES.get(name, ("", ""))
    if key.split(".")[0] not in root.model_fields:
        return None
    key = _last_part(key) if _last_part(key) in siblings else key
    return f"use `{key}`{f' ({remark})' if remark else ''}"


def key_of(name: str, root: type[BaseModel]) -> str | None:
    """Return the whole key of a field that is called ``name``; None: no node has it, or several do."""
    return _outermost(name, _keys(root))


def key_near(name: str, root: type[BaseModel]) -> str | None:
    """Return the whole key of the field whose name is most similar to ``name``; None: none is near, or several are."""
    keys = _keys(root)
    near = nearest(name, {_last_part(key) for key in keys})
    return None if near is None else _outermost(near, keys)


def _outermost(name: str, keys: list[str]) -> str | None:
    named = sorted((key for key in keys if _last_part(key) == name), key=lambda key: key.count("."))
    outer = [key for key in named if key.count(".") == named[0].count(".")]
    return outer[0] if len(outer) == 1 else None


def _keys(node: type[BaseModel], path: str = "") -> list[str]:
    """Return the keys of this node and of those in its fields, without lists and dicts."""
    keys = [f"{path}{key}" for key in node.model_fields]
    for key, field in node.model_fields.items():
        many = get_origin(field.annotation) in (list, dict)
        for inner in () if many else (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                keys += _keys(inner, f"{path}{key}.")
    return keys


def _last_part(key: str) -> str:
    return key.rpartition(".")[2]

"""Where a recipe has what other trainers call by other names.

docs/coming-from.md shows the same table, and errors of unknown keys quote it.
"""

from __future__ import annotations

from typing import NamedTuple, get_args, get_origin

from pydantic import BaseModel

from omnitrain.recipe.suggest import nearest


class Here(NamedTuple):
    """What a recipe has in the place of another trainer's key.

    Attributes:
        key: of a recipe, or a key with a value; empty: a recipe needs no such key.
        remark: what to know if the two do not mean the same; without a key, what to do.
    """

    key: str
    remark: str = ""

    @property
    def advice(self) -> str:
        """What to write."""
        if not self.key:
            return self.remark
        return f"use `{self.key}`{f' ({self.remark})' if self.remark else ''}"


_SAMPLES = "samples of a step, over all ranks; or `train.micro_batches` packs of `data.pack_tokens` tokens"
_LENGTH = "the length of a pack; longer samples: `data.overlong`"
_LIST = "a list of data sets, each with a `path`"
_PROCESSOR = "a folder or Hub id; unset: the chat template saved with the foundation"
_STEPS = "a number of steps"
_TARGETS = "`all-linear` or a list of globs"
_BALANCE = "with `train.experts.loss`"
_REMOVE = "remove it:"
_PACKED = f"{_REMOVE} samples are always packed, without padding"
_NO_PREFERENCES = f"{_REMOVE} there is no training on preferences or rewards"
_ANSWERS = f"{_REMOVE} only the assistant's messages are trained"
_DIVIDED = f"{_REMOVE} ranks divide the packs of a step among themselves"
_NO_DORA = f"{_REMOVE} there is no DoRA, whose magnitudes need whole matrices in every forward"
_QUANTIZED = f"{_REMOVE} a quantized checkpoint is dequantized when it is loaded"
_PROJECTOR = "`image_encoder.projector`, or the name of the module in the foundation"
_FRAMES = "of an image, and of a frame of a video"

# Trainers -> their name -> what a recipe has. HF Trainer's names also hold for those that pass them on to it.
OF_TRAINERS: dict[str, dict[str, Here]] = {
    "HF Trainer": {
        "max_steps": Here("train.steps"),
        "num_train_epochs": Here("train.epochs"),
        "train_batch_size": Here("train.samples_per_step", _SAMPLES),
        "per_device_train_batch_size": Here("train.samples_per_step", _SAMPLES),
        "per_device_eval_batch_size": Here("evaluation.batch_size"),
        "gradient_accumulation_steps": Here(
            "train.micro_batches", "packs in a step, over all ranks; a rank accumulates its share"
        ),
        "learning_rate": Here("train.optimizer.learning_rate"),
        "weight_decay": Here("train.optimizer.weight_decay"),
        "adam_beta1": Here("train.optimizer.betas", "both in a list"),
        "adam_beta2": Here("train.optimizer.betas", "both in a list"),
        "adam_epsilon": Here("train.optimizer.eps"),
        "max_grad_norm": Here("train.optimizer.max_grad_norm"),
        "warmup_steps": Here("train.optimizer.warmup_steps"),
        "warmup_ratio": Here("train.optimizer.warmup_steps", _STEPS),
        "lr_scheduler_type": Here("train.optimizer.schedule"),
        "optim": Here("train.optimizer.kind", "`adamw` or `muon`"),
        "bf16": Here("train.precision=bf16"),
        "fp16": Here("train.precision=bf16", "there is no fp16, which would need loss scaling"),
        "seed": Here("train.seed"),
        "data_seed": Here("train.seed"),
        "use_cpu": Here("train.device=cpu"),
        "no_cuda": Here("train.device=cpu"),
        "logging_steps": Here("train.log_every"),
        "save_steps": Here("train.save_every"),
        "save_strategy": Here("train.save_every", _STEPS),
        "save_total_limit": Here("train.keep_last"),
        "load_best_model_at_end": Here("train.keep_best", "also keeps that checkpoint"),
        "metric_for_best_model": Here("train.keep_best"),
        "eval_steps": Here("evaluation.loss_every", "or `evaluation.every`, with generated answers"),
        "eval_strategy": Here("evaluation.loss_every", _STEPS),
        "evaluation_strategy": Here("evaluation.loss_every", _STEPS),
        "predict_with_generate": Here("evaluation.every", _STEPS),
        "report_to": Here("train.track.to", "a list"),
        "run_name": Here("train.track.name"),
        "torch_compile": Here("train.compile"),
        "gradient_checkpointing": Here("parallel.default.recompute=full"),
        "fsdp": Here("parallel.default"),
        "fsdp_config": Here("parallel.default"),
        "deepspeed": Here("parallel.default", "FSDP2 is the default"),
        "use_liger_kernel": Here("model.ops", "`liger` of each operation, such as `model.ops.rms_norm=liger`"),
        "ddp_timeout": Here("train.stall_seconds"),
        "dataloader_num_workers": Here("data.workers"),
        "train_file": Here("data.train", _LIST),
        "dataset_name": Here("data.train", _LIST),
        "validation_file": Here("data.heldout", _LIST),
        "tokenizer_name": Here("model.tokenizer"),
        "do_train": Here("", f"{_REMOVE} `omnitrain run` trains"),
        "do_eval": Here("evaluation", "with `data.heldout`"),
        "resume_from_checkpoint": Here("", f"{_REMOVE} `omnitrain resume RUN` continues a run"),
        "group_by_length": Here("", _PACKED),
        "overwrite_output_dir": Here("", f"{_REMOVE} an earlier run in `output_dir` is moved aside"),
        "ddp_find_unused_parameters": Here("", f"{_REMOVE} a rank without media calls its encoders, too"),
        "remove_unused_columns": Here("", f"{_REMOVE} scorers get all columns"),
    },
    "Others": {
        "epochs": Here("train.epochs"),
        "batch_size": Here("train.samples_per_step", _SAMPLES),
        "lr": Here("train.optimizer.learning_rate"),
        "max_seq_length": Here("data.pack_tokens", _LENGTH),
        "tp_size": Here("parallel.default.tp"),
        "r": Here("parallel.default.lora.rank"),
        "use_rslora": Here("parallel.default.lora.rslora"),
        "use_dora": Here("", _NO_DORA),
        "dora": Here("", _NO_DORA),
    },
    "TRL, LLaMA-Factory": {"model_name_or_path": Here("model.foundation")},
    "TRL, axolotl": {
        "attn_implementation": Here("model.ops.attention"),
        "lora_r": Here("parallel.default.lora.rank"),
        "lora_target_modules": Here("parallel.default.lora.targets", _TARGETS),
        "load_in_4bit": Here("", _QUANTIZED),
        "load_in_8bit": Here("", _QUANTIZED),
        "activation_offloading": Here("parallel.default.activation_offload"),
    },
    "TRL, LLaMA-Factory, ms-swift": {"packing": Here("", _PACKED)},
    "TRL, ms-swift": {"max_length": Here("data.pack_tokens", _LENGTH), "padding_free": Here("", _PACKED)},
    "TRL, LLaMA-Factory, ms-swift, axolotl": {
        "lora_alpha": Here("parallel.default.lora.alpha"),
        "lora_dropout": Here("parallel.default.lora.dropout"),
    },
    "LLaMA-Factory, ms-swift": {
        "lora_rank": Here("parallel.default.lora.rank"),
        "template": Here("data.processor", _PROCESSOR),
        "dataset": Here("data.train", _LIST),
    },
    "TRL, LLaMA-Factory, axolotl": {
        "trust_remote_code": Here("", f"{_REMOVE} code of a checkpoint is not run; `plugins` import your own classes")
    },
    "LLaMA-Factory, ms-swift, axolotl": {
        "streaming": Here("data.train.0.streaming", "of a data set of the Hub; files are read where they are")
    },
    "LLaMA-Factory, axolotl": {"flash_attn": Here("model.ops.attention", "`auto` chooses")},
    "TRL": {
        "use_peft": Here("parallel.default.lora"),
        "dataset_text_field": Here("data.train.0.columns.text"),
        "dataset_train_split": Here("data.train.0.split"),
        "dataset_test_split": Here("data.heldout.0.split"),
        "dataset_config": Here("data.train.0.subset"),
        "chat_template_path": Here("data.processor", _PROCESSOR),
        "completion_only_loss": Here("", _ANSWERS),
        "assistant_only_loss": Here("", _ANSWERS),
        "eval_packing": Here("", _PACKED),
        "truncation_mode": Here("data.overlong", "`drop`, `error` or `split`; nothing is truncated"),
        "router_aux_loss_coef": Here("train.experts.weight", _BALANCE),
    },
    "LLaMA-Factory": {
        "stage": Here("", f"{_REMOVE} `omnitrain run` trains on answers, or on documents (`columns.text`)"),
        "finetuning_type": Here("parallel.default.lora", "for `lora`; unset, all weights train"),
        "lora_target": Here("parallel.default.lora.targets", _TARGETS),
        "eval_dataset": Here("data.heldout", _LIST),
        "dataset_dir": Here("data.train.0.path"),
        "formatting": Here("data.train.0.format", "`llama_factory`"),
        "media_dir": Here("data.train.0.media_folder"),
        "cutoff_len": Here("data.pack_tokens", _LENGTH),
        "max_samples": Here("data.train.0.limit"),
        "val_size": Here("data.heldout", f"{_LIST}; split the rows before the run"),
        "mix_strategy": Here("data.train.0.weight", "of each data set"),
        "interleave_probs": Here("data.train.0.weight", "of each data set"),
        "neat_packing": Here("", _PACKED),
        "default_system": Here("data.train.0.columns.system", "a column with the text"),
        "pref_loss": Here("", _NO_PREFERENCES),
        "train_on_prompt": Here("", _ANSWERS),
        "mask_history": Here("", f"{_REMOVE} a message with `weight: 0` is not trained"),
        "preprocessing_num_workers": Here("data.workers"),
        "overwrite_cache": Here("", f"{_REMOVE} rows are read where they are, and no copy is prepared"),
        "image_max_pixels": Here("data.max_pixels", _FRAMES),
        "image_min_pixels": Here("data.min_pixels", _FRAMES),
        "video_max_pixels": Here("data.max_pixels", _FRAMES),
        "video_fps": Here("data.fps"),
        "video_maxlen": Here("data.max_frames"),
        "use_audio_in_video": Here("data.audio_in_video"),
        "freeze_vision_tower": Here("model.freeze=[image_encoder]"),
        "freeze_multi_modal_projector": Here("model.freeze", _PROJECTOR),
        "freeze_language_model": Here("model.freeze=[foundation]"),
        "adapter_name_or_path": Here("model.checkpoint", "the folder of a run with adapters"),
        "quantization_bit": Here("", _QUANTIZED),
        "enable_liger_kernel": Here("model.ops", "`liger` of each operation, such as `model.ops.rms_norm=liger`"),
        "moe_aux_loss_coef": Here("train.experts.weight", _BALANCE),
        "pure_bf16": Here("train.precision=bf16", "weights that train stay fp32"),
        "use_muon": Here("train.optimizer.kind=muon"),
        "early_stopping_steps": Here("train.early_stopping.patience", "with `metric`"),
        "plot_loss": Here("train.report", "report.html has the curves"),
        "export_dir": Here("", f"{_REMOVE} `omnitrain export RUN FOLDER` writes the model"),
    },
    "ms-swift": {
        "tuner_type": Here("parallel.default.lora", "for `lora`; unset, all weights train"),
        "train_type": Here("parallel.default.lora", "for `lora`; unset, all weights train"),
        "target_modules": Here("parallel.default.lora.targets", _TARGETS),
        "columns": Here("data.train.0.columns"),
        "adapters": Here("model.checkpoint", "the folder of a run with adapters"),
        "rlhf_type": Here("", _NO_PREFERENCES),
        "val_dataset": Here("data.heldout", _LIST),
        "split_dataset_ratio": Here("data.heldout", f"{_LIST}; split the rows before the run"),
        "interleave_prob": Here("data.train.0.weight", "of each data set"),
        "dataset_num_proc": Here("data.workers"),
        "max_pixels": Here("data.max_pixels", _FRAMES),
        "truncation_strategy": Here("data.overlong", "`drop`, `error` or `split`; nothing is truncated"),
        "loss_scale": Here("", f"{_REMOVE} a message with `weight: 0` is not trained"),
        "torch_dtype": Here("train.precision", "weights that train are fp32"),
        "attn_impl": Here("model.ops.attention"),
        "sequence_parallel_size": Here("parallel.default.ulysses"),
        "freeze_llm": Here("model.freeze=[foundation]"),
        "freeze_vit": Here("model.freeze=[image_encoder]"),
        "freeze_aligner": Here("model.freeze", _PROJECTOR),
        "vit_lr": Here("train.optimizer.learning_rates", "`{image_encoder: ...}`"),
        "aligner_lr": Here("train.optimizer.learning_rates", "`{image_encoder.projector: ...}`"),
        "model_type": Here("", f"{_REMOVE} any model of transformers is read by its config"),
        "quant_bits": Here("", _QUANTIZED),
        "expert_model_parallel_size": Here("parallel.default.ep"),
        "tensor_model_parallel_size": Here("parallel.default.tp"),
        "pipeline_model_parallel_size": Here("parallel.default.pp"),
        "context_parallel_size": Here("parallel.default.cp"),
        "moe_aux_loss_coeff": Here("train.experts.weight", _BALANCE),
    },
    "axolotl": {
        "base_model": Here("model.foundation"),
        "adapter": Here("parallel.default.lora", "for `lora`; unset, all weights train"),
        "rl": Here("", _NO_PREFERENCES),
        "lora_target_linear": Here("parallel.default.lora.targets", _TARGETS),
        "lora_modules_to_save": Here("parallel.default.lora.targets", "only adapters train in that component"),
        "datasets": Here("data.train", _LIST),
        "test_datasets": Here("data.heldout", _LIST),
        "pretraining_dataset": Here("data.train", "with `columns.text`"),
        "val_set_size": Here("data.heldout", f"{_LIST}; split the rows before the run"),
        "dataset_prepared_path": Here("", f"{_REMOVE} rows are read where they are, and no copy is prepared"),
        "data_files": Here("data.train.0.path"),
        "field_messages": Here("data.train.0.columns.messages"),
        "field_instruction": Here("data.train.0.columns.prompt"),
        "field_input": Here("data.train.0.columns.prompt", "a list of both columns"),
        "field_output": Here("data.train.0.columns.response"),
        "field_system": Here("data.train.0.columns.system"),
        "field_tools": Here("data.train.0.columns.tools"),
        "roles_to_train": Here("", _ANSWERS),
        "train_on_inputs": Here("", _ANSWERS),
        "chat_template": Here("data.processor", _PROCESSOR),
        "sequence_len": Here("data.pack_tokens", _LENGTH),
        "excess_length_strategy": Here("data.overlong", "`drop`, `error` or `split`; nothing is truncated"),
        "sample_packing": Here("", _PACKED),
        "eval_sample_packing": Here("", _PACKED),
        "pad_to_sequence_len": Here("", _PACKED),
        "micro_batch_size": Here("train.samples_per_step", _SAMPLES),
        "num_epochs": Here("train.epochs"),
        "lr_scheduler": Here("train.optimizer.schedule"),
        "cosine_min_lr_ratio": Here("train.optimizer.final_ratio"),
        "optimizer": Here("train.optimizer", "its `kind`: `adamw` or `muon`"),
        "flash_attention": Here("model.ops.attention=flash", "`auto` chooses"),
        "saves_per_epoch": Here("train.save_every", _STEPS),
        "evals_per_epoch": Here("evaluation.loss_every", _STEPS),
        "early_stopping_patience": Here("train.early_stopping.patience", "with `metric`"),
        "wandb_project": Here("train.track.project", "with `train.track.to=[wandb]`"),
        "wandb_name": Here("train.track.name"),
        "use_tensorboard": Here("train.track.to=[tensorboard]"),
        "freeze_mm_modules": Here("model.freeze=[image_encoder]"),
        "unfrozen_parameters": Here("model.freeze", "names what does not train"),
        "dp_shard_size": Here("parallel.default.dp_shard"),
        "sequence_parallel_degree": Here("parallel.default.cp"),
        "tensor_parallel_size": Here("parallel.default.tp"),
        "expert_parallel_size": Here("parallel.default.ep"),
    },
    "VeOmni": {
        "model_path": Here("model.foundation"),
        "config_path": Here("model.foundation.config", "with random weights"),
        "tokenizer_path": Here("data.processor", _PROCESSOR),
        "ops_implementation": Here("model.ops"),
        "lora_config": Here("parallel.default.lora"),
        "train_path": Here("data.train", _LIST),
        "eval_path": Here("data.heldout", _LIST),
        "text_keys": Here("data.train.0.columns.messages", "or `columns.text`"),
        "max_seq_len": Here("data.pack_tokens", _LENGTH),
        "dyn_bsz": Here("", _PACKED),
        "dyn_bsz_buffer_size": Here("data.packing_buffer"),
        "rmpad": Here("", _PACKED),
        "rmpad_with_pos_ids": Here("", _PACKED),
        "pad_to_length": Here("", _PACKED),
        "global_batch_size": Here("train.samples_per_step", _SAMPLES),
        "mm_configs": Here("data.processor_arguments"),
        "dataloader": Here("data.workers"),
        "lr_warmup_ratio": Here("train.optimizer.warmup_steps", _STEPS),
        "lr_decay_style": Here("train.optimizer.schedule"),
        "lr_min": Here("train.optimizer.final_ratio", "a share of the learning rate"),
        "wandb": Here("train.track.to=[wandb]"),
        "profile": Here("", f"{_REMOVE} `omnitrain profile RECIPE` profiles steps"),
        "accelerator": Here("parallel.default"),
        "data_parallel_mode": Here("parallel.default.mode"),
        "dp_replicate_size": Here("parallel.default.dp_replicate"),
        "ulysses_size": Here("parallel.default.ulysses"),
        "ulysses_parallel_size": Here("parallel.default.ulysses"),
        "cp_size": Here("parallel.default.cp"),
        "ep_size": Here("parallel.default.ep"),
        "enable_async": Here("parallel.default.async_ulysses"),
        "init_device": Here("", f"{_REMOVE} no rank holds the whole model"),
        "enable_full_determinism": Here("", f"{_REMOVE} a run depends on `train.seed` alone"),
        "freeze_audio_tower": Here("model.freeze=[audio_encoder]"),
        "encoder_data_balance": Here("parallel.default.place=world", "of all encoders"),
    },
}

OTHER_NAMES: dict[str, Here] = {name: here for names in OF_TRAINERS.values() for name, here in names.items()}


def name_here(name: str, root: type[BaseModel]) -> str | None:
    """Return what to write for another trainer's ``name``; None: none has it, or ``root`` is no recipe."""
    here = OTHER_NAMES.get(name)
    return here.advice if here is not None and "data" in root.model_fields else None


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

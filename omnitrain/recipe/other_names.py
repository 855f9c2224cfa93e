"""Where a recipe has what other trainers call by other names.

docs/coming-from.md shows the same table, and errors of unknown keys quote it.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple, get_args, get_origin

import yaml
from pydantic import BaseModel

from omnitrain.recipe.suggest import nearest


class Here(NamedTuple):
    """What a recipe has in the place of another trainer's key; without a key, it needs none."""

    key: str
    remark: str = ""  # if the two do not mean the same, what to know; without a key, what to do

    @property
    def advice(self) -> str:
        """What to write."""
        if not self.key:
            return self.remark
        return f"use `{self.key}`{f' ({self.remark})' if self.remark else ''}"


# Key, or key and value, of a recipe (`none`: it needs no such key) | remark | trainers: their names; ... The names of
# HF Trainer also hold for the trainers that pass them on to it.
_TABLE = """
model.ops | `liger` of each operation, such as `model.ops.rms_norm=liger` | HF Trainer: use_liger_kernel; \
    LLaMA-Factory: enable_liger_kernel
model.ops | | VeOmni: ops_implementation
model.tokenizer | | HF Trainer: tokenizer_name
model.foundation | | TRL, LLaMA-Factory: model_name_or_path; axolotl: base_model; VeOmni: model_path
model.ops.attention | | TRL, axolotl: attn_implementation; ms-swift: attn_impl
model.ops.attention | `auto` chooses | LLaMA-Factory, axolotl: flash_attn
model.ops.attention=flash | `auto` chooses | axolotl: flash_attention
model.freeze=[image_encoder] | | LLaMA-Factory: freeze_vision_tower; ms-swift: freeze_vit; axolotl: \
    freeze_mm_modules
model.freeze | `image_encoder.projector`, or the name of the module in the foundation | LLaMA-Factory: \
    freeze_multi_modal_projector; ms-swift: freeze_aligner
model.freeze | names what does not train | axolotl: unfrozen_parameters
model.freeze=[foundation] | | LLaMA-Factory: freeze_language_model; ms-swift: freeze_llm
model.freeze=[audio_encoder] | | VeOmni: freeze_audio_tower
model.checkpoint | the folder of a run with adapters | LLaMA-Factory: adapter_name_or_path; ms-swift: adapters
model.foundation.config | with random weights | VeOmni: config_path
data.workers | | HF Trainer: dataloader_num_workers; LLaMA-Factory: preprocessing_num_workers; ms-swift: \
    dataset_num_proc; VeOmni: dataloader
data.train | a list of data sets, each with a `path` | HF Trainer: train_file dataset_name; LLaMA-Factory, ms-swift: \
    dataset; axolotl: datasets; VeOmni: train_path
data.train | with `columns.text` | axolotl: pretraining_dataset
data.heldout | a list of data sets, each with a `path` | HF Trainer: validation_file; LLaMA-Factory: eval_dataset; \
    ms-swift: val_dataset; axolotl: test_datasets; VeOmni: eval_path
data.heldout | a list of data sets, each with a `path`; split the rows before the run | LLaMA-Factory: val_size; \
    ms-swift: split_dataset_ratio; axolotl: val_set_size
data.pack_tokens | the length of a pack; longer samples: `data.overlong` | Others: max_seq_length; TRL, ms-swift: \
    max_length; LLaMA-Factory: cutoff_len; axolotl: sequence_len; VeOmni: max_seq_len
data.processor | a folder or Hub id; unset: the chat template saved with the foundation | LLaMA-Factory, ms-swift: \
    template; TRL: chat_template_path; axolotl: chat_template; VeOmni: tokenizer_path
data.train.0.streaming | of a data set of the Hub; files are read where they are | LLaMA-Factory, ms-swift, axolotl: \
    streaming
data.train.0.columns.text | | TRL: dataset_text_field
data.train.0.split | | TRL: dataset_train_split
data.heldout.0.split | | TRL: dataset_test_split
data.train.0.subset | | TRL: dataset_config
data.overlong | `drop`, `error` or `split`; nothing is truncated | TRL: truncation_mode; ms-swift: \
    truncation_strategy; axolotl: excess_length_strategy
data.train.0.path | | LLaMA-Factory: dataset_dir; axolotl: data_files
data.train.0.format | `llama_factory` | LLaMA-Factory: formatting
data.train.0.media_folder | | LLaMA-Factory: media_dir
data.train.0.limit | | LLaMA-Factory: max_samples
data.train.0.weight | of each data set | LLaMA-Factory: mix_strategy interleave_probs; ms-swift: interleave_prob
data.train.0.columns.system | a column with the text | LLaMA-Factory: default_system
data.train.0.columns.system | | axolotl: field_system
data.max_pixels | of an image, and of a frame of a video | LLaMA-Factory: image_max_pixels video_max_pixels; \
    ms-swift: max_pixels
data.min_pixels | of an image, and of a frame of a video | LLaMA-Factory: image_min_pixels
data.fps | | LLaMA-Factory: video_fps
data.max_frames | | LLaMA-Factory: video_maxlen
data.audio_in_video | | LLaMA-Factory: use_audio_in_video
data.train.0.columns | | ms-swift: columns
data.train.0.columns.messages | | axolotl: field_messages
data.train.0.columns.messages | or `columns.text` | VeOmni: text_keys
data.train.0.columns.prompt | | axolotl: field_instruction
data.train.0.columns.prompt | a list of both columns | axolotl: field_input
data.train.0.columns.response | | axolotl: field_output
data.train.0.columns.tools | | axolotl: field_tools
data.packing_buffer | | VeOmni: dyn_bsz_buffer_size
data.processor_arguments | | VeOmni: mm_configs
train.steps | | HF Trainer: max_steps
train.epochs | | HF Trainer: num_train_epochs; Others: epochs; axolotl: num_epochs
train.samples_per_step | samples of a step, over all ranks; or `train.packs_per_step` packs of `data.pack_tokens` \
    tokens | HF Trainer: train_batch_size per_device_train_batch_size; Others: batch_size; axolotl: micro_batch_size; \
    VeOmni: global_batch_size
train.packs_per_step | packs in a step, over all ranks; a rank accumulates its share | HF Trainer: \
    gradient_accumulation_steps
train.optimizer.learning_rate | | HF Trainer: learning_rate; Others: lr
train.optimizer.weight_decay | | HF Trainer: weight_decay
train.optimizer.betas | both in a list | HF Trainer: adam_beta1 adam_beta2
train.optimizer.eps | | HF Trainer: adam_epsilon
train.optimizer.max_grad_norm | | HF Trainer: max_grad_norm
train.optimizer.warmup_steps | | HF Trainer: warmup_steps
train.optimizer.warmup_steps | a number of steps | HF Trainer: warmup_ratio; VeOmni: lr_warmup_ratio
train.optimizer.schedule | | HF Trainer: lr_scheduler_type; axolotl: lr_scheduler; VeOmni: lr_decay_style
train.optimizer.kind | `adamw` or `muon` | HF Trainer: optim
train.optimizer.kind=muon | | LLaMA-Factory: use_muon
train.precision=bf16 | | HF Trainer: bf16
train.precision=bf16 | there is no fp16, which would need loss scaling | HF Trainer: fp16
train.precision=bf16 | weights that train stay fp32 | LLaMA-Factory: pure_bf16
train.precision | weights that train are fp32 | ms-swift: torch_dtype
train.seed | | HF Trainer: seed data_seed
train.device=cpu | | HF Trainer: use_cpu no_cuda
train.log_every | | HF Trainer: logging_steps
train.save.every | | HF Trainer: save_steps
train.save.every | a number of steps | HF Trainer: save_strategy; axolotl: saves_per_epoch
train.save.keep_last | | HF Trainer: save_total_limit
train.save.keep_best | also keeps that checkpoint | HF Trainer: load_best_model_at_end
train.save.keep_best | | HF Trainer: metric_for_best_model
train.track.to | a list | HF Trainer: report_to
train.track.to=[tensorboard] | | axolotl: use_tensorboard
train.track.to=[wandb] | | VeOmni: wandb
train.track.name | | HF Trainer: run_name; axolotl: wandb_name
train.compile | | HF Trainer: torch_compile
train.stall_seconds | | HF Trainer: ddp_timeout
train.experts.weight | with `train.experts.loss` | TRL: router_aux_loss_coef; LLaMA-Factory: moe_aux_loss_coef; \
    ms-swift: moe_aux_loss_coeff
train.early_stopping.patience | with `metric` | LLaMA-Factory: early_stopping_steps; axolotl: \
    early_stopping_patience
train.report | report.html has the curves | LLaMA-Factory: plot_loss
train.optimizer.learning_rates | `{image_encoder: ...}` | ms-swift: vit_lr
train.optimizer.learning_rates | `{image_encoder.projector: ...}` | ms-swift: aligner_lr
train.optimizer.final_ratio | | axolotl: cosine_min_lr_ratio
train.optimizer.final_ratio | a share of the learning rate | VeOmni: lr_min
train.optimizer | its `kind`: `adamw` or `muon` | axolotl: optimizer
train.track.project | with `train.track.to=[wandb]` | axolotl: wandb_project
parallel.default.memory.recompute=full | | HF Trainer: gradient_checkpointing
parallel.default | | HF Trainer: fsdp fsdp_config; VeOmni: accelerator
parallel.default | FSDP2 is the default | HF Trainer: deepspeed
parallel.default.tp | | Others: tp_size; ms-swift: tensor_model_parallel_size; axolotl: tensor_parallel_size
parallel.default.lora.rank | | Others: r; TRL, axolotl: lora_r; LLaMA-Factory, ms-swift: lora_rank
parallel.default.lora.rslora | | Others: use_rslora
parallel.default.lora.targets | `all-linear` (the default), or a list of globs | TRL, axolotl: lora_target_modules; \
    LLaMA-Factory: lora_target; ms-swift: target_modules; axolotl: lora_target_linear
parallel.default.lora.targets | only adapters train in that component | axolotl: lora_modules_to_save
parallel.default.memory.offload=[activations] | | TRL, axolotl: activation_offloading
parallel.default.lora.alpha | | TRL, LLaMA-Factory, ms-swift, axolotl: lora_alpha
parallel.default.lora.dropout | | TRL, LLaMA-Factory, ms-swift, axolotl: lora_dropout
parallel.default.lora | | TRL: use_peft; VeOmni: lora_config
parallel.default.lora | for `lora`; unset, all weights train | LLaMA-Factory: finetuning_type; ms-swift: tuner_type \
    train_type; axolotl: adapter
parallel.default.ulysses | | ms-swift: sequence_parallel_size; VeOmni: ulysses_size ulysses_parallel_size
parallel.default.ep | | ms-swift: expert_model_parallel_size; axolotl: expert_parallel_size; VeOmni: ep_size
parallel.default.pp | | ms-swift: pipeline_model_parallel_size
parallel.default.cp | | ms-swift: context_parallel_size; axolotl: sequence_parallel_degree; VeOmni: cp_size
parallel.default.dp_shard | | axolotl: dp_shard_size
parallel.default.mode | | VeOmni: data_parallel_mode
parallel.default.dp_replicate | | VeOmni: dp_replicate_size
parallel.default.async_ulysses | | VeOmni: enable_async
parallel.default.place=world | of all encoders | VeOmni: encoder_data_balance
evaluation.batch_size | | HF Trainer: per_device_eval_batch_size
evaluation.loss_every | or `evaluation.every`, with generated answers | HF Trainer: eval_steps
evaluation.loss_every | a number of steps | HF Trainer: eval_strategy evaluation_strategy; axolotl: evals_per_epoch
evaluation.every | a number of steps | HF Trainer: predict_with_generate
evaluation | with `data.heldout` | HF Trainer: do_eval
none | `omnitrain run` trains | HF Trainer: do_train
none | `omnitrain run FOLDER` continues a run | HF Trainer: resume_from_checkpoint
none | samples are always packed, without padding | HF Trainer: group_by_length; TRL, LLaMA-Factory, ms-swift: \
    packing; TRL, ms-swift: padding_free; TRL: eval_packing; LLaMA-Factory: neat_packing; axolotl: sample_packing \
    eval_sample_packing pad_to_sequence_len; VeOmni: dyn_bsz rmpad rmpad_with_pos_ids pad_to_length
none | an earlier run in `output_dir` is moved aside | HF Trainer: overwrite_output_dir
none | a rank without media calls its encoders, too | HF Trainer: ddp_find_unused_parameters
none | scorers get all columns | HF Trainer: remove_unused_columns
none | there is no DoRA, whose magnitudes need whole matrices in every forward | Others: use_dora dora
none | a quantized checkpoint is dequantized when it is loaded | TRL, axolotl: load_in_4bit load_in_8bit; \
    LLaMA-Factory: quantization_bit; ms-swift: quant_bits
none | code of a checkpoint is not run; `plugins` import your own classes | TRL, LLaMA-Factory, axolotl: \
    trust_remote_code
none | only the assistant's messages are trained | TRL: completion_only_loss assistant_only_loss; LLaMA-Factory: \
    train_on_prompt; axolotl: roles_to_train train_on_inputs
none | `omnitrain run` trains on answers, or on documents (`columns.text`) | LLaMA-Factory: stage
none | there is no training on preferences or rewards | LLaMA-Factory: pref_loss; ms-swift: rlhf_type; axolotl: rl
none | a message with `weight: 0` is not trained | LLaMA-Factory: mask_history; ms-swift: loss_scale
none | rows are read where they are, and no copy is prepared | LLaMA-Factory: overwrite_cache; axolotl: \
    dataset_prepared_path
none | `omnitrain export RUN FOLDER` writes the model | LLaMA-Factory: export_dir
none | any model of transformers is read by its config | ms-swift: model_type
none | `omnitrain profile RECIPE` profiles steps | VeOmni: profile
none | no rank holds the whole model | VeOmni: init_device
none | a run depends on `train.seed` alone | VeOmni: enable_full_determinism
"""


# Class of a node -> key of older versions -> what a recipe has in its place; VALUE: the value of the old key.
OLD_KEYS = {
    "Train": {
        "micro_batches": "packs_per_step=VALUE",
        "save_every": "save.every=VALUE",
        "async_save": "save.background=VALUE",
        "keep_last": "save.keep_last=VALUE",
        "keep_every": "save.keep_every=VALUE",
        "keep_best": "save.keep_best=VALUE",
    },
    "ComponentPlan": {
        "recompute": "memory.recompute=VALUE",
        "saved_ops": "memory.recompute={keep: VALUE}",
        "recomputed_parts": "memory.recompute={parts: VALUE}",
        "offloaded_tensors": "memory.offload=VALUE",
        "activation_offload": "memory.offload=[activations]",
        "parameter_offload": "memory.offload=[parameters]",
        "optimizer_offload": "memory.offload=[optimizer]",
        "window": "encode.window=VALUE",
        "features_on": "encode.features_on=VALUE",
        "feature_bytes": "encode.feature_bytes=VALUE",
        "call_elements": "encode.call_elements=VALUE",
        "expert_rows": "experts.rows=VALUE",
        "expert_chunks": "experts.chunks=VALUE",
        "expert_dispatcher": "experts.dispatcher=VALUE",
        "delay_wgrad": "experts.delay_wgrad=VALUE",
    },
}


def in_place_of(node: type[BaseModel], key: str, value: object) -> str | None:
    """Return what an old ``key`` of a node with this value is now, such as ``save.every=5``; None: it is not old."""
    now = OLD_KEYS.get(node.__name__, {}).get(key)
    if now is None:
        return None
    if value is False and "VALUE" not in now:  # nothing of the list was offloaded
        now, value = f"{now.partition('=')[0]}=VALUE", []
    return now.replace("VALUE", yaml.safe_dump(value, default_flow_style=True, width=inf).partition("\n")[0])


def _of_trainers() -> dict[str, dict[str, Here]]:
    found: dict[str, dict[str, Here]] = {}
    for row in _TABLE.strip().splitlines():
        key, remark, names = (" ".join(cell.split()) for cell in row.split("|"))
        here = Here("", f"remove it: {remark}") if key == "none" else Here(key, remark)
        for trainers, theirs in (part.split(":") for part in names.split("; ")):
            found.setdefault(trainers, {}).update(dict.fromkeys(theirs.split(), here))
    return found


OF_TRAINERS = _of_trainers()  # trainers, joined by commas -> their name -> what a recipe has
OTHER_NAMES = {name: here for names in OF_TRAINERS.values() for name, here in names.items()}


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

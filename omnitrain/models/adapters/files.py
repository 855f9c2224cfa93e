"""Save and load adapters in peft's files: one folder per HF model, which ``PeftModel.from_pretrained`` reads.

Of ``E`` experts, our A ``[E, r, in]`` is peft's ``[E*r, in]``; our B ``[E, out, r]`` is peft's ``[out, r*E]``, where
column ``j*E + e`` is column j of expert e. peft wraps a module once for each of its parameters with adapters: the
adapters of the last parameter are at the module, the adapters of the parameter before it at its ``base_layer``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from omnitrain.checkpoint.model_files import ADAPTERS
from omnitrain.checkpoint.store import set_default_modes
from omnitrain.errors import UserError, WeightsError
from omnitrain.models.adapters.lora import (
    ADAPTER,
    Adapters,
    adapters_of,
    add_lora,
    names_without_adapters,
    peft,
    root_of,
    token_matrices,
)
from omnitrain.models.components.model import ComponentModel
from omnitrain.models.hf.load import folder_with, foundation_class
from omnitrain.models.hf.stored_tensor import StoredTensor, read_or_left_in_file, replace_value
from omnitrain.ops.experts.lora import parameter_names
from omnitrain.ops.experts.weights import experts_in, matrix_names
from omnitrain.recipe.parallel import FOUNDATION

T = TypeVar("T")
Conversion = Callable[[Tensor], Tensor]

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_FIELDS: dict[str, tuple[type, ...]] = {  # the fields of the config that we read
    "r": (int,),
    "lora_alpha": (int, float),
    "rank_pattern": (dict,),
    "alpha_pattern": (dict,),
    "target_modules": (list,),
    "target_parameters": (list, type(None)),
}
_PREFIX = "base_model.model"
_WEIGHT = ".weight"
# In models with fused experts peft takes linear layers with these names (such as dense layers) for unfused experts of
# old checkpoints, and drops their adapters. It keeps them if we name them by their parameter.
_TAKEN_FOR_EXPERTS = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


def split_weights(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split a model's ``state_dict`` into the other weights, under their original names, and the adapters."""
    if not isinstance(model, ComponentModel):
        return dict(weights), {}
    base = {name: weights[renamed] for name, renamed in names_without_adapters(model, weights).items()}
    return base, {name: tensor for name, tensor in weights.items() if name in model.adapter_names}


def save_adapters(model: ComponentModel, folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Write ``adapters/NAME`` of each HF model; ``weights``: whole adapters and embeddings, by names in ``model``."""
    for file, entries in adapter_tensors(model).items():
        (folder / file).parent.mkdir(parents=True)
        tensors = {key: to_peft(weights[name]).contiguous() for key, (name, to_peft) in entries.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        set_default_modes([folder / file])
    save_adapter_configs(model, folder)


def adapter_tensors(model: PreTrainedModel) -> dict[str, dict[str, tuple[str, Conversion]]]:
    """Return what :func:`save_adapters` writes: file -> key in it -> name in ``model``, and how it is stored."""
    return {
        f"{ADAPTERS}/{root}/{_WEIGHTS}": {
            key: (name, entry.to_peft) for key, (name, entry) in _entries(model, root, adapters)
        }
        for root, adapters in _by_root(model).items()
    }


def save_adapter_configs(model: PreTrainedModel, folder: Path) -> None:
    """Write the configs of :func:`save_adapters`, without the weights."""
    for root, adapters in _by_root(model).items():
        _config(model, root, adapters).save_pretrained(str(folder / ADAPTERS / root))


def stored_adapters(model: ComponentModel, path: str | Path) -> dict[str, Adapters]:
    """Return component -> its adapters in a checkpoint, without weights; UserError: missing, or no such layer."""
    return _stored(model, _folders_at(path))


def load_adapters(model: ComponentModel, path: str | Path, subfolder: str = "", **hub: Any) -> None:
    """Load the adapters of a checkpoint into ``model``, and freeze the components that have adapters.

    ``model``: without adapters, not parallelized; on the meta device it gets only their shapes. ``path``: a folder or
    Hub id; without ``adapters`` in ``subfolder``, nothing changes. ``hub``: arguments of ``snapshot_download``. Raises
    UserError: peft is missing, or see :func:`stored_adapters`; WeightsError: tensors do not fit.
    """
    folders = _folders_at(path, subfolder, **hub)
    add_lora(model, _stored(model, folders))
    for folder in folders if model.device.type != "meta" else ():
        _fill(model, folder.name, folder)


def _folders_at(path: str | Path, subfolder: str = "", **hub: Any) -> list[Path]:
    below = PurePosixPath(subfolder) / ADAPTERS
    parent = folder_with(path, f"{below}/*", **hub) / below
    return sorted(folder for folder in parent.glob("[!.]*") if folder.is_dir())


def _stored(model: ComponentModel, folders: Iterable[Path]) -> dict[str, Adapters]:
    adapters: dict[str, Adapters] = {}
    for folder in folders:
        adapters |= _adapters_in(model, folder.name, _read(folder / _CONFIG, _config_in))
    return adapters


def _config_in(file: Path) -> dict[str, Any]:
    config = json.loads(file.read_text())
    fields = config if isinstance(config, dict) else {}
    if wrong := [name for name, kinds in _FIELDS.items() if not isinstance(fields.get(name), kinds)]:
        raise ValueError(f"save_pretrained did not write this config; missing or wrong: {', '.join(wrong)}")
    return fields


def _read(file: Path, read: Callable[[Path], T]) -> T:
    try:
        return read(file)
    except (OSError, ValueError, SafetensorError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise UserError(f"cannot read the adapters in {file} ({problem}); copy the checkpoint again") from None


@dataclass(frozen=True)
class _Entry:
    """How a tensor is stored: of an embedding only ``rows``; of a linear layer (``num_experts`` is 0) as it is."""

    is_a: bool = True
    num_experts: int = 0
    rows: tuple[int, ...] = ()

    def to_peft(self, tensor: Tensor) -> Tensor:
        if self.rows:
            return tensor[list(self.rows)]
        if not self.num_experts:
            return tensor
        return tensor.flatten(0, 1) if self.is_a else tensor.permute(1, 2, 0).flatten(1)

    def from_peft(self, tensor: Tensor) -> Tensor:
        if not self.num_experts:
            return tensor
        if self.is_a:
            return tensor.unflatten(0, (self.num_experts, -1))
        return tensor.unflatten(1, (-1, self.num_experts)).permute(2, 0, 1)


def _by_root(model: PreTrainedModel) -> dict[str, list[Adapters]]:
    by_root: dict[str, list[Adapters]] = {}
    if not isinstance(model, ComponentModel):
        return by_root
    for component, adapters in adapters_of(model).items():
        by_root.setdefault(root_of(model, component), []).append(adapters)
    return by_root


def _entries(model: PreTrainedModel, root: str, adapters: list[Adapters]) -> Iterator[tuple[str, tuple[str, _Entry]]]:
    """Key in the file -> name in the model, and how the tensor is stored."""
    experts = {path for each in adapters for path in each.experts}
    for name in (name for each in adapters for name in each.linears):
        for matrix in "AB":
            key = f"{_PREFIX}.{_below(root, name)}.lora_{matrix}.weight"
            yield key, (f"{name}.lora_{matrix}.{ADAPTER}.weight", _Entry())
    for owner in dict.fromkeys(path.rpartition(".")[0] for path in sorted(experts)):
        module = model.get_submodule(owner)
        matrices = matrix_names(module)
        # peft wraps matrices in the order in which they are registered.
        registered = [name for name, _ in module.named_parameters(recurse=False) if name in matrices]
        adapted = [name for name in registered if f"{owner}.{name}" in experts]
        for depth, weight in enumerate(reversed(adapted)):
            wrapper = f"{_PREFIX}.{_below(root, owner)}{'.base_layer' * depth}"
            for matrix, name in zip("AB", parameter_names(weight), strict=True):
                entry = _Entry(matrix == "A", module.get_parameter(weight).size(0))
                yield f"{wrapper}.lora_{matrix}.weight", (f"{owner}.{name}", entry)
    for name, rows in _token_matrices(model, root).items():
        key = f"{_PREFIX}.{_below(root, name).removesuffix(_WEIGHT)}.token_adapter.trainable_tokens_delta"
        yield key, (name, _Entry(rows=rows))


def _token_matrices(model: PreTrainedModel, root: str) -> dict[str, tuple[int, ...]]:
    return token_matrices(cast(ComponentModel, model)) if root == FOUNDATION else {}


def _below(root: str, name: str) -> str:
    return name.removeprefix(f"{root}.")


def _config(model: PreTrainedModel, root: str, adapters: list[Adapters]) -> Any:
    first = adapters[0]
    has_experts = any(True for _ in experts_in(model.get_submodule(root)))
    modules, parameters = {}, {}
    for each in adapters:
        for name in (_below(root, linear) for linear in each.linears):
            if has_experts and name.rpartition(".")[2] in _TAKEN_FOR_EXPERTS:
                parameters[name + _WEIGHT] = each
            else:
                modules[name] = each
        parameters |= {_below(root, name): each for name in each.experts}
    all_adapted = (modules | parameters).items()
    differing = {name: each for name, each in all_adapted if (each.rank, each.alpha) != (first.rank, first.alpha)}
    matrices = _token_matrices(model, root).items()
    tokens = {_below(root, name).removesuffix(_WEIGHT): list(rows) for name, rows in matrices}
    config = peft().LoraConfig(
        r=first.rank,
        lora_alpha=first.alpha,
        rank_pattern={name: each.rank for name, each in differing.items()},
        alpha_pattern={name: each.alpha for name, each in differing.items()},
        target_modules=list(modules),
        target_parameters=list(parameters),
        use_rslora=first.rslora,
        lora_dropout=first.dropout,
        trainable_token_indices=tokens or None,
        inference_mode=True,
    )
    config.base_model_name_or_path = model.get_submodule(root).name_or_path or None
    if tokens:  # so that AutoPeftModel builds the base, and makes rows for the tokens
        kind = foundation_class(cast(ComponentModel, model).foundation.config)
        config.auto_mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    return config


def _adapters_in(model: ComponentModel, root: str, config: Mapping[str, Any]) -> dict[str, Adapters]:
    """Component -> adapters, from a file's config, in which layers have full names."""
    base = {names[0]: name for name, names in model.renamed.items()}
    owner = {base.get(path, path): name for name, parameters in model.components.items() for path in parameters}
    values: dict[str, dict[str, Any]] = {}
    # peft keeps the names as a set, whose order changes from process to process.
    modules = {name: name + _WEIGHT for name in sorted(config["target_modules"])}
    for name, parameter in (modules | {name: name for name in sorted(config["target_parameters"] or ())}).items():
        component = owner.get(f"{root}.{parameter}")
        if component is None:
            raise UserError(f"the checkpoint has {root} adapters for {name}, but the model has no such layer")
        rank = config["rank_pattern"].get(name, config["r"])
        alpha = config["alpha_pattern"].get(name, config["lora_alpha"])
        entry = values.setdefault(component, {"rank": rank, "alpha": alpha, "linears": [], "experts": []})
        if (rank, alpha) != (entry["rank"], entry["alpha"]):
            raise UserError(
                f"the checkpoint has {root} adapters for {name} of rank {rank} and alpha {alpha:g}, but others of "
                f"{component} of rank {entry['rank']} and alpha {entry['alpha']:g}; a component must have one of each"
            )
        kind = "linears" if parameter.endswith(_WEIGHT) else "experts"
        entry[kind].append(f"{root}.{parameter.removesuffix(_WEIGHT)}")
    rows = config.get("trainable_token_indices") or {"": []}
    return {
        name: Adapters(
            entry["rank"],
            entry["alpha"],
            tuple(sorted(entry["linears"])),
            tuple(sorted(entry["experts"])),
            config.get("use_rslora", False),
            config.get("lora_dropout", 0.0),
            tuple(next(iter(rows.values()))) if name == FOUNDATION else (),
        )
        for name, entry in values.items()
    }


@torch.no_grad()
def _fill(model: ComponentModel, root: str, folder: Path) -> None:
    stored = _read(folder / _WEIGHTS, read_or_left_in_file)
    entries = dict(_entries(model, root, _by_root(model)[root]))
    problems = [f"  missing: {key}" for key in sorted(entries.keys() - stored.keys())]
    problems += [f"  not in the model: {key}" for key in sorted(stored.keys() - entries.keys())]
    for key in sorted(entries.keys() & stored.keys()):
        name, entry = entries[key]
        parameter = model.get_parameter(name)
        expected = tuple(entry.to_peft(torch.empty_like(parameter, device="meta")).shape)
        if tuple(stored[key].shape) != expected:
            problems.append(f"  wrong shape: {key}: file {tuple(stored[key].shape)}, model {expected}")
        elif not problems and not entry.rows:
            value = entry.from_peft(stored[key])
            if isinstance(value, StoredTensor):
                replace_value(parameter, value.to(parameter))
            else:
                parameter.copy_(value)
    if problems:
        raise WeightsError("\n".join([f"the adapters in {folder} do not fit the model:", *problems]))

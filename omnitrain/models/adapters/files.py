"""Adapters in files of peft: one folder per HF model, which ``PeftModel.from_pretrained`` reads.

Experts in peft's layout, ``E`` of them, rank ``r``:

    ours        A [E, r, in]              B [E, out, r]
    peft's      lora_A.weight [E*r, in]   lora_B.weight [out, r*E], of which column ``j*E + e`` is column j of expert e

peft wraps a module once for each of its parameters that has adapters: the last parameter's are at the module, those of
the one before it at its ``base_layer``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from omnitrain.errors import UserError, WeightsError
from omnitrain.models.adapters.lora import ADAPTER, Adapters, adapters_of, add_lora, peft, root_of
from omnitrain.models.components.model import ComponentModel
from omnitrain.models.hf.load import folder_with
from omnitrain.ops.experts import experts_in, matrix_names, parameter_names

T = TypeVar("T")

FOLDER = "adapters"
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_FIELDS: dict[str, tuple[type, ...]] = {  # of the config, those that are read
    "r": (int,),
    "lora_alpha": (int, float),
    "rank_pattern": (dict,),
    "alpha_pattern": (dict,),
    "target_modules": (list,),
    "target_parameters": (list, type(None)),
}
_PREFIX = "base_model.model"
_WEIGHT = ".weight"
# In models with fused experts peft takes linear layers of these names (dense ones beside them, say) for experts of
# checkpoints from before they were fused, and drops their adapters. Named by their parameter, they are what they are.
_TAKEN_FOR_EXPERTS = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


def split_weights(model: ComponentModel, weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A model's ``state_dict`` -> that of the model without adapters, under its own names, and the adapters'."""
    base_of = {names[0]: base for base, names in model.renamed.items()}
    added = model.adapter_names
    base = {base_of.get(name, name): tensor for name, tensor in weights.items() if name not in added}
    return base, {name: tensor for name, tensor in weights.items() if name in added}


def save_adapters(model: ComponentModel, folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Write ``adapters/NAME`` for each HF model that has some: ``foundation``, or an encoder.

    Args:
        model: with adapters, laid out or not.
        folder: of the checkpoint.
        weights: whole adapters by their names in ``model``, see :func:`split_weights`.
    """
    for root, adapters in _by_root(model).items():
        into = folder / FOLDER / root
        into.mkdir(parents=True)
        tensors = {
            key: entry.to_peft(weights[name]).contiguous() for key, (name, entry) in _entries(model, root, adapters)
        }
        save_file(tensors, into / _WEIGHTS, metadata={"format": "pt"})
        _config(model, root, adapters).save_pretrained(str(into))


def remove_adapters(folder: Path) -> None:
    """Those of a model that was saved in ``folder`` before; there need not be any."""
    shutil.rmtree(folder / FOLDER, ignore_errors=True)


def stored_adapters(model: ComponentModel, path: str | Path) -> dict[str, Adapters]:
    """Component of ``model`` -> the adapters that a checkpoint has for it; weights are not read.

    Args:
        model: with adapters or without.
        path: folder or Hub id of the checkpoint.

    Raises:
        UserError: no such checkpoint, a file that cannot be read, or adapters of layers that the model does not have.
    """
    return _stored(model, _folders_at(path))


def load_adapters(model: ComponentModel, path: str | Path, subfolder: str = "", **hub: Any) -> None:
    """Put the adapters of a checkpoint into ``model``, and freeze the components that have some.

    Args:
        model: without adapters, not laid out. On the meta device it gets their shapes, and weights are not read.
        path: folder or Hub id of the checkpoint; one without ``adapters`` changes nothing.
        subfolder: of it, in which the checkpoint is.
        **hub: for ``snapshot_download``.

    Raises:
        UserError: peft is missing, or see :func:`stored_adapters`.
        WeightsError: tensors that are missing, left over or misshapen.
    """
    folders = _folders_at(path, subfolder, **hub)
    add_lora(model, _stored(model, folders))
    for folder in folders if model.device.type != "meta" else ():
        _fill(model, folder.name, folder)


def _folders_at(path: str | Path, subfolder: str = "", **hub: Any) -> list[Path]:
    """One per HF model that has adapters."""
    inside = PurePosixPath(subfolder) / FOLDER
    found = folder_with(path, f"{inside}/*", **hub) / inside
    return sorted(folder for folder in found.glob("[!.]*") if folder.is_dir())


def _stored(model: ComponentModel, folders: Iterable[Path]) -> dict[str, Adapters]:
    found: dict[str, Adapters] = {}
    for folder in folders:
        found |= _adapters_in(model, folder.name, _read(folder / _CONFIG, _config_in))
    return found


def _config_in(file: Path) -> dict[str, Any]:
    config = json.loads(file.read_text())
    fields = config if isinstance(config, dict) else {}
    if wrong := [name for name, kinds in _FIELDS.items() if not isinstance(fields.get(name), kinds)]:
        raise ValueError(f"not a config that save_pretrained wrote: {', '.join(wrong)}")
    return fields


def _read(file: Path, read: Callable[[Path], T]) -> T:
    try:
        return read(file)
    except (OSError, ValueError, SafetensorError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise UserError(f"cannot read the adapters in {file} ({problem}); copy the checkpoint again") from None


@dataclass(frozen=True)
class _Entry:
    """How a tensor lies in the file. ``num_experts`` is 0 for linear layers, which are stored as they are."""

    is_a: bool = True
    num_experts: int = 0

    def to_peft(self, tensor: Tensor) -> Tensor:
        if not self.num_experts:
            return tensor
        return tensor.flatten(0, 1) if self.is_a else tensor.permute(1, 2, 0).flatten(1)

    def from_peft(self, tensor: Tensor) -> Tensor:
        if not self.num_experts:
            return tensor
        if self.is_a:
            return tensor.unflatten(0, (self.num_experts, -1))
        return tensor.unflatten(1, (-1, self.num_experts)).permute(2, 0, 1)


def _by_root(model: ComponentModel) -> dict[str, list[Adapters]]:
    found: dict[str, list[Adapters]] = {}
    for component, adapters in adapters_of(model).items():
        found.setdefault(root_of(model, component), []).append(adapters)
    return found


def _entries(model: ComponentModel, root: str, adapters: list[Adapters]) -> Iterator[tuple[str, tuple[str, _Entry]]]:
    """Key in the file -> name in the model, and how the tensor lies in the file."""
    experts = {path for own in adapters for path in own.experts}
    for name in (name for own in adapters for name in own.linears):
        for matrix in "AB":
            key = f"{_PREFIX}.{_below(root, name)}.lora_{matrix}.weight"
            yield key, (f"{name}.lora_{matrix}.{ADAPTER}.weight", _Entry())
    for owner in dict.fromkeys(path.rpartition(".")[0] for path in sorted(experts)):
        module = model.get_submodule(owner)
        adapted = [name for name in _in_order(module) if f"{owner}.{name}" in experts]
        for depth, weight in enumerate(reversed(adapted)):
            wrapper = f"{_PREFIX}.{_below(root, owner)}{'.base_layer' * depth}"
            for matrix, name in zip("AB", parameter_names(weight), strict=True):
                entry = _Entry(matrix == "A", module.get_parameter(weight).size(0))
                yield f"{wrapper}.lora_{matrix}.weight", (f"{owner}.{name}", entry)


def _in_order(module: torch.nn.Module) -> list[str]:
    """Matrices of experts as they are registered, which is the order in which peft wraps them."""
    matrices = matrix_names(module)
    return [name for name, _ in module.named_parameters(recurse=False) if name in matrices]


def _below(root: str, name: str) -> str:
    return name.removeprefix(f"{root}.")


def _config(model: ComponentModel, root: str, adapters: list[Adapters]) -> Any:
    first = adapters[0]
    has_experts = any(True for _ in experts_in(model.get_submodule(root)))
    modules, parameters = {}, {}
    for own in adapters:
        for name in own.linears:
            if has_experts and name.endswith(tuple(f".{taken}" for taken in _TAKEN_FOR_EXPERTS)):
                parameters[_below(root, name) + _WEIGHT] = own
            else:
                modules[_below(root, name)] = own
        parameters |= {_below(root, name): own for name in own.experts}
    differing = {
        name: own for name, own in (modules | parameters).items() if (own.rank, own.alpha) != (first.rank, first.alpha)
    }
    config = peft().LoraConfig(
        r=first.rank,
        lora_alpha=first.alpha,
        rank_pattern={name: own.rank for name, own in differing.items()},
        alpha_pattern={name: own.alpha for name, own in differing.items()},
        target_modules=list(modules),
        target_parameters=list(parameters),
        inference_mode=True,
    )
    config.base_model_name_or_path = model.get_submodule(root).name_or_path or None
    return config


def _adapters_in(model: ComponentModel, root: str, config: Mapping[str, Any]) -> dict[str, Adapters]:
    """Component -> adapters, of a file's config with full names of layers."""
    base = {names[0]: name for name, names in model.renamed.items()}
    owner = {base.get(path, path): name for name, parameters in model.components.items() for path in parameters}
    found: dict[str, dict[str, Any]] = {}
    modules = {name: name + _WEIGHT for name in config["target_modules"]}
    for name, parameter in (modules | {name: name for name in config["target_parameters"] or ()}).items():
        component = owner.get(f"{root}.{parameter}")
        if component is None:
            raise UserError(f"the adapters of {root} are for {name}, which the model does not have")
        rank = config["rank_pattern"].get(name, config["r"])
        alpha = config["alpha_pattern"].get(name, config["lora_alpha"])
        own = found.setdefault(component, {"rank": rank, "alpha": alpha, "linears": [], "experts": []})
        kind = "linears" if parameter.endswith(_WEIGHT) else "experts"
        own[kind].append(f"{root}.{parameter.removesuffix(_WEIGHT)}")
    return {
        name: Adapters(own["rank"], own["alpha"], tuple(sorted(own["linears"])), tuple(sorted(own["experts"])))
        for name, own in found.items()
    }


@torch.no_grad()
def _fill(model: ComponentModel, root: str, folder: Path) -> None:
    stored = _read(folder / _WEIGHTS, load_file)
    entries = dict(_entries(model, root, _by_root(model)[root]))
    problems = [f"  missing: {key}" for key in sorted(entries.keys() - stored.keys())]
    problems += [f"  not in the model: {key}" for key in sorted(stored.keys() - entries.keys())]
    for key in sorted(entries.keys() & stored.keys()):
        name, entry = entries[key]
        parameter = model.get_parameter(name)
        expected = tuple(entry.to_peft(torch.empty_like(parameter, device="meta")).shape)
        if tuple(stored[key].shape) != expected:
            problems.append(f"  wrong shape: {key}: file {tuple(stored[key].shape)}, model {expected}")
        elif not problems:
            parameter.copy_(entry.from_peft(stored[key]))
    if problems:
        raise WeightsError("\n".join([f"the adapters in {folder} do not fit the model:", *problems]))

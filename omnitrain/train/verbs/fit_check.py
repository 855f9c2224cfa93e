"""Check for ``omnitrain check``, without memory for weights, that weight files fit and components run."""

from __future__ import annotations

from typing import Any

import torch

from omnitrain.checkpoint.store import newest_checkpoint
from omnitrain.errors import UserError
from omnitrain.models.hf.load import config_at, foundation_class, foundation_config, load_strictly, model_class
from omnitrain.models.hf.tied import untie_as_in_files
from omnitrain.models.omni.build import omni_config_at
from omnitrain.models.omni.model import OmniModel
from omnitrain.recipe import Model
from omnitrain.torch_private import NEED_CONTENT, FakeTensorMode
from omnitrain.train.metrics.display import show_unused


def weights_problems(recipe: Model) -> list[str]:
    """Compare names and shapes in a recipe's weight files with the models; return one message per misfit.

    It prints tensors of a foundation's files that the foundation does not have.
    """
    problems = []
    for key, path in _weight_folders(recipe):
        try:
            if key == "model.checkpoint":
                folder = str(newest_checkpoint(path))
                load_strictly(OmniModel, folder, device_map="meta", config=omni_config_at(folder))
            else:
                config, class_of = config_at(path), model_class
                if key == "model.foundation" or key.startswith("model.teachers."):
                    config, class_of = foundation_config(config), foundation_class
                    untie_as_in_files(config, class_of(config), path)
                model = load_strictly(class_of(config), path, allow_extra=True, device_map="meta", config=config)
                show_unused(model.unused_tensors if key == "model.foundation" else None)
        except UserError as error:
            problems.append(f"{key}: {error}")
    return problems


def _weight_folders(recipe: Model) -> list[tuple[str, str]]:
    folders = {"model.checkpoint": recipe.checkpoint}
    sources = {"model.foundation": recipe.foundation}
    sources |= {f"model.encoders.{name}.tower": encoder.tower for name, encoder in recipe.encoders.items()}
    sources |= {f"model.decoders.{name}.tokenizer": decoder.tokenizer for name, decoder in recipe.decoders.items()}
    folders |= {key: source.path for key, source in sources.items() if source is not None}
    folders |= {f"model.teachers.{name}": path for name, path in recipe.teachers.items()}
    return [(key, folder) for key, folder in folders.items() if folder is not None]


def forward_problems(model: OmniModel) -> list[str]:
    """Run every encoder and decoder on its smallest input without content; return one message per failure.

    Some configs only fail in the model's forward. The contract check runs the foundation and teachers. A forward that
    depends on the content of a tensor runs up to that point. The tensors of ``model``, on ``meta``, are replaced.
    """
    components = {name: part for name, part in (model.encoders | model.decoders).items() if name not in model.teachers}
    return [problem for name, component in components.items() if (problem := _problem(name, component))]


def _problem(name: str, component: Any) -> str:
    try:
        arguments = component.minimal_input()
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            component.to_empty(device="cpu")
            component.lm_encode(*arguments)
    except NEED_CONTENT:
        return ""
    except UserError as error:
        return f"model, {name}: cannot run: {error}"
    except Exception as error:  # each model fails differently
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return f"model, {name}: cannot run with this config: {reason}"
    return ""

"""Try a named attention backend on a tiny model, so that unsupported layers are found before training."""

from __future__ import annotations

import torch

from omnitrain.data.packing.pack import Pack
from omnitrain.errors import UserError
from omnitrain.models.contract.harness import Trial
from omnitrain.models.foundation.runner import FoundationRunner
from omnitrain.ops.attention.install import use_omnitrain_attention


def require_attention_backend(runner: FoundationRunner, backend: str, device: torch.device, dtype: torch.dtype) -> None:
    """Run two packed texts through a tiny model of the foundation with ``backend``, as training would.

    Args:
        runner: runner of the foundation, on any device including ``meta``.
        backend: name of the backend, not ``auto``.
        device: device on which the foundation will train.
        dtype: dtype in which it will compute.

    Raises:
        UserError: the backend cannot compute a layer (the message names the layer, the reason and the backends that
            can), or the model keeps its own attention.
    """
    model, contract = runner.model, runner.contract
    if contract.attention != "omnitrain":
        raise UserError(
            f"attention backend {backend!r}: {type(model).__name__} keeps its own attention; set the backend to auto"
        )
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        trial = Trial.by(model, contract)
        use_omnitrain_attention(trial.ours, backend)
        trial.ours.to(device, dtype)
        pack = Pack.from_samples(trial.texts[: 2 if contract.packs else 1]).to(device)
        trial.runner.text_loss(pack, trial.media(pack))

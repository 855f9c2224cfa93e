"""Find modules whose parameters are read while they do not run, such as a convolution whose weight another module uses.

An FSDP unit gathers its parameters only for its own forward, so such a module cannot be a unit.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from omnitrain.data.packing.pack import Pack
from omnitrain.models.contract.harness import Trial
from omnitrain.models.discovery import ParameterReads
from omnitrain.recipe.globs import any_layer


@torch.no_grad()
def read_from_outside(trial: Trial) -> tuple[str, ...]:
    """Return the names of these modules, with ``*`` for indices in module lists; tied parameters are ignored."""
    with _Outside(trial.ours) as reads:
        for case in trial.telling_cases:
            pack = Pack.from_samples([case.probe.sample])
            trial.logits(pack, trial.media(pack))
    called = [name for name, module in trial.ours.named_modules() if not isinstance(module, nn.ModuleList)]
    return tuple(dict.fromkeys(any_layer(name) for name in called if name in reads.names))


class _Outside(ParameterReads):
    """Records, for each parameter that is read, the modules around it that are not running."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._model, self._hooks = model, ExitStack()
        self._running: list[nn.Module] = []
        holders = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
        self._tied = {name for name, parameter in model.named_parameters() if holders[parameter] > 1}
        self._modules = dict(model.named_modules())

    def __enter__(self) -> Any:
        for module in self._modules.values():
            begin = module.register_forward_pre_hook(lambda m, *_: self._running.append(m))
            end = module.register_forward_hook(lambda m, *_: self._running.remove(m), always_call=True)
            self._hooks.enter_context(begin)
            self._hooks.enter_context(end)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._hooks.close()
        super().__exit__(*error)

    def note(self, name: str) -> None:
        """Record the modules around the parameter ``name`` that are not running."""
        if name not in self._tied:
            around = [name.rsplit(".", cut)[0] for cut in range(1, name.count(".") + 1)]
            self.names |= {outer for outer in around if self._modules[outer] not in self._running}

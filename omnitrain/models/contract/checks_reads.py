"""Find modules whose parameters are read while they do not run, such as a convolution whose weight another module uses.

An FSDP unit gathers its parameters only for its own forward, so such a module cannot be a unit.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from omnitrain.data.packing.pack import Pack
from omnitrain.models.contract.trial import Trial
from omnitrain.models.discovery import ParameterReads, watching
from omnitrain.recipe.globs import any_layer


@torch.no_grad()
def read_from_outside(trial: Trial) -> tuple[str, ...]:
    """Return the names of these modules, with ``*`` for indices in module lists; tied parameters are ignored."""
    reads = _Outside(trial.ours)
    begin, end = (lambda _, m, *__: reads.running.append(m)), (lambda _, m, *__: reads.running.remove(m))
    with watching(trial.ours.named_modules(), begin, end), reads:
        for case in trial.telling_cases:
            pack = Pack.from_samples([case.probe.sample])
            trial.logits(pack, trial.media(pack))
    called = [name for name, module in trial.ours.named_modules() if not isinstance(module, nn.ModuleList)]
    return tuple(dict.fromkeys(any_layer(name) for name in called if name in reads.names))


class _Outside(ParameterReads):
    """Records, for each parameter that is read, the modules around it that are not running."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.running: list[nn.Module] = []
        holders = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
        self._tied = {name for name, parameter in model.named_parameters() if holders[parameter] > 1}
        self._modules = dict(model.named_modules())

    def note(self, name: str) -> None:
        """Record the modules around the parameter ``name`` that are not running."""
        if name not in self._tied:
            around = [name.rsplit(".", cut)[0] for cut in range(1, name.count(".") + 1)]
            self.names |= {outer for outer in around if self._modules[outer] not in self.running}

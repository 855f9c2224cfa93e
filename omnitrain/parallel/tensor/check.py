"""A check on a tiny model that tensor parallelism does not change results, before anything is sharded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from omnitrain.errors import UserError
from omnitrain.models.contract.samples import Probe
from omnitrain.models.contract.tiny_model import tiny_configs
from omnitrain.models.contract.trial import Failure, Trial, attempt, errors_of
from omnitrain.models.discovery.text_run import text_blocks
from omnitrain.parallel.state import ParallelState
from omnitrain.parallel.tensor.apply import add_up_over_tp, shard_matrices
from omnitrain.parallel.tensor.sequence_parallel import TokenSharding, apply_sequence_parallel, ends_of
from omnitrain.parallel.tensor.styles import STYLES
from omnitrain.recipe.parallel import FOUNDATION

# Rounding changes logits and gradients by 1e-5 of their size. A norm over only a rank's part of the features changes
# them by much more. Gradients below a hundredth of the largest one are compared with that hundredth.
_TOLERANCE, _SMALLEST = 1e-3, 1e-2


def require_same_math(
    model: PreTrainedModel, styles: Mapping[str, str], state: ParallelState, root: str = FOUNDATION
) -> None:
    """Raise UserError unless a tiny model, sharded as ``model`` will be, has the whole one's logits and gradients.

    Every tensor parallel rank takes part. Only the class and config of ``model`` are used, and only styles in it, which
    begin with its name ``root``.
    """
    if problem := _tried(model, styles, state, root, divide=False)[0]:
        raise UserError(
            f"tp_plan: {type(model).__name__} gives other results with this plan. On a tiny model, {problem}; "
            "give each rank whole heads and whole inputs of norms (colwise_gather_output, rowwise_split_input), or "
            "leave modules out"
        )


def try_tokens(foundation: PreTrainedModel, styles: Mapping[str, str], state: ParallelState) -> TokenSharding:
    """Check a tiny model whose tokens are divided between its blocks against the whole one, on all ``tp`` ranks."""
    problem, ends = _tried(foundation, styles, state, FOUNDATION, divide=True)
    return TokenSharding(f"on a tiny model, {problem}" if problem else "", ends)


def _tried(
    model: PreTrainedModel, styles: Mapping[str, str], state: ParallelState, root: str, *, divide: bool
) -> tuple[str, frozenset[str]]:
    """Return what is wrong with a sharded tiny model (or nothing), and the matrices that end regions."""
    inside = {n.removeprefix(f"{root}."): s for n, s in styles.items() if n.startswith(f"{root}.")}
    if not inside:
        return "", frozenset()
    with torch.enable_grad(), torch.random.fork_rng(devices=[]), ExitStack() as trials:
        for config in tiny_configs(model.config):
            trial = attempt(trials.enter_context, Trial.of(type(model), config))
            probes = [] if isinstance(trial, Failure) else attempt(_accepted, trial)
            if not isinstance(trial, Failure) and probes and not isinstance(probes, Failure):
                found = attempt(_measured, trial.plain.to(state.device_type), probes, inside, state, divide=divide)
                return (f"it does not run: {found}", frozenset()) if isinstance(found, Failure) else found
    raise UserError(f"tp: no tiny {type(model).__name__} runs, so its plan cannot be tried; use tp 1")


def _accepted(trial: Trial) -> list[Probe]:
    """The samples that plain transformers runs; empty if the first of them, a text, does not run."""
    accepted = [probe for probe in trial.probes if not isinstance(attempt(trial.run_plain, probe), Failure)]
    return accepted if accepted and not accepted[0].modalities else []


def _measured(
    tiny: PreTrainedModel, probes: Sequence[Probe], styles: Mapping[str, str], state: ParallelState, *, divide: bool
) -> tuple[str, frozenset[str]]:
    """Compare; the tiny model is whole before and sharded afterwards."""
    ends: set[str] = set()
    if divide:
        with ends_of(text_blocks(tiny), styles, dict(tiny.named_modules())) as ends:
            _logits(tiny, probes[0])
    expected = _outcome(tiny, probes, share=1.0)
    cut = _divided(tiny, styles, state.size("tp"))
    last = TokenSharding(ends=frozenset(ends)).ends_in(cut)
    shard_matrices(tiny, cut, state.tp_mesh, last)
    if divide:
        apply_sequence_parallel(tiny, [tiny.get_submodule(name) for name in last], state.tp_mesh.get_group())
    tiny.zero_grad()
    found = _outcome(tiny, probes, share=1.0 if state.tp_rank == 0 else 0.0, state=state)
    if missing := expected[1].keys() - found[1].keys():
        return f"there is no gradient of {min(missing)}", frozenset(ends)
    errors = errors_of(found[0], expected[0]) | errors_of(found[1], expected[1], _SMALLEST)
    differing = [
        f"the {name} differ by {error:.1e} of their size" for name, error in errors.items() if not error <= _TOLERANCE
    ]
    return next(iter(differing), ""), frozenset(ends)


def _divided(tiny: PreTrainedModel, styles: Mapping[str, str], tp: int) -> dict[str, str]:
    """Return the styles that apply to the tiny model, without those for sizes that its ranks do not divide."""
    parameters = dict(tiny.named_parameters(remove_duplicate=False))
    modules = dict(tiny.named_modules())

    def fits(name: str, style: str) -> bool:
        own = {n: p for n, p in parameters.items() if n == name or n.rpartition(".")[0] == name}
        dims = [(p, STYLES[style].dim(n.rpartition(".")[2], p)) for n, p in own.items()]
        return all(dim is None or p.size(dim) % tp == 0 for p, dim in dims)

    there = {name: style for name, style in styles.items() if name in modules or name in parameters}
    misfits = {name.rpartition(".")[0] for name, style in there.items() if not fits(name, style)}
    return {name: style for name, style in there.items() if name.rpartition(".")[0] not in misfits}


def _logits(tiny: PreTrainedModel, probe: Probe) -> Tensor:
    device = next(tiny.parameters()).device
    arguments = {name: value.to(device) for name, value in probe.arguments.items()}
    logits: Tensor = tiny(**arguments, use_cache=False).logits
    return logits


def _outcome(
    tiny: PreTrainedModel, probes: Sequence[Probe], *, share: float, state: ParallelState | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return unsharded logits by name, and gradients by name."""
    outputs, gradients = dict[str, Tensor](), dict[str, Tensor]()
    for number, probe in enumerate(probes):
        logits = _logits(tiny, probe).float()
        towards = torch.randn(logits.shape, generator=torch.Generator().manual_seed(number)).to(logits.device)
        (logits * towards * share).sum().backward()
        outputs[f"logits of sample {number}"] = logits.detach()
    if state is not None:
        add_up_over_tp(tiny.parameters(), state)
    for name, parameter in tiny.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            gradients[f"gradient of {name}"] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()
    return outputs, gradients

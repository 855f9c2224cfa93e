"""The result of the contract check: how a foundation must be run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from omnitrain.errors import UserError

Outcome = Literal["passed", "fallback", "left out", "refused"]


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str  # name of the check, as in docs/models.md
    outcome: Outcome  # `fallback`: a slower, exact method; `left out`: a term that only transformers would train
    fact: str  # the measurement, and the action taken


@dataclass(frozen=True)
class SkippedModule:
    """A module with parameters that a forward calls only for some samples."""

    module: str  # name of the module, with ``*`` for indices in module lists
    parent: str  # name of the nearest outer module that every forward calls
    takes: tuple[tuple[int, ...], ...] = ()  # sizes of its arguments when they are empty
    problem: str = ""  # why it cannot be called on empty arguments; empty string: it can


@dataclass(frozen=True)
class StageContract:
    """Where a foundation may be cut into pipeline stages. A cut is named by the index of the block after it."""

    problem: str = ""  # why it cannot be cut anywhere; empty: it can
    cuts: tuple[int, ...] = ()  # the cuts that leave the loss and all gradients of the whole model as they are
    refused: dict[int, str] = field(default_factory=dict)  # other cut -> what was measured there
    needs_embeddings: bool = False  # every stage needs the input embeddings, with their media; not only the first
    # side features (deepstack levels) -> the block after which the model adds them; those without are needed everywhere
    levels: dict[str, int] = field(default_factory=dict)
    returns: tuple[int, int] | None = None  # entries of a block's output, index of the hidden states; None: only these
    readers: dict[str, tuple[str, ...]] = field(default_factory=dict)  # outside of blocks -> `first`, `inner`, `last`

    def require(self, model: str, cut: int) -> None:
        """Raise UserError unless the model is exact if cut before the block ``cut``; its ends are no cuts."""
        if self.problem:
            raise UserError(f"{model} cannot be cut into pipeline stages: {self.problem}; set pp to 1")
        if cut in self.refused:
            raise UserError(
                f"{model} cannot be cut before block {cut}: {self.refused[cut]}; "
                f"it can be cut before blocks {', '.join(map(str, self.cuts))}"
            )

    def reads(self, side: str, start: int, stop: int) -> bool:
        """Whether the blocks ``start`` to ``stop`` (exclusive) read a side feature."""
        return side not in self.levels or start <= self.levels[side] < stop

    def block_output(self, hidden: Any) -> Any:
        """Return ``hidden`` as a block returns it, with None for all other entries."""
        if self.returns is None:
            return hidden
        number, place = self.returns
        return tuple(hidden if index == place else None for index in range(number))


@dataclass(frozen=True)
class Contract:
    """How a foundation must be run so that training it is exact."""

    attention: Literal["omnitrain", "native"] = "omnitrain"  # `native`: the model's own, which cannot pack
    head: Literal["inside", "plain"] = "inside"  # the loss is computed in the head, or on the logits of the model
    packs: bool = True  # whether several samples may share a pack
    segmented: tuple[str, ...] = ()  # classes that run one sample at a time: they carry state along the sequence
    by_sample: tuple[str, ...] = ()  # modalities encoded one sample at a time: the tower mixes the items of a call
    # modules, with indices from the end, in which each token reaches only the same token of the last hidden states
    tokenwise: tuple[str, ...] = ()
    without_tails: bool = False  # whether tokens after the last supervised token can be skipped
    skipped_modules: tuple[SkippedModule, ...] = ()  # by some samples, in the order of a forward that skips none
    read_outside: tuple[str, ...] = ()  # modules (``*``: of any layer) whose parameters are read while they do not run
    # modules and bare parameters without a gradient from text and from media that are encoded outside the forward
    beyond_text: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()  # the result of every check

    @property
    def refusals(self) -> tuple[Finding, ...]:
        """Findings that refuse the model."""
        return tuple(finding for finding in self.findings if finding.outcome == "refused")

    @property
    def why_unpacked(self) -> str:
        """Why ``packs`` is False; empty if samples may be packed."""
        return next((f.fact for f in self.findings if f.check == "packing" and f.outcome != "passed"), "")

    def noting(self, check: str, outcome: Outcome, fact: str) -> Contract:
        """Return this contract with one more finding."""
        return replace(self, findings=(*self.findings, Finding(check, outcome, fact)))

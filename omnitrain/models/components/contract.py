"""The result of the contract check: how a foundation must be run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from omnitrain.errors import UserError

Outcome = Literal["passed", "fallback", "left out", "refused"]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        check: name of the check, as in docs/models.md.
        outcome: ``passed``; ``fallback``: a slower, exact method is used; ``left out``: transformers would train this
            term and omnitrain does not; ``refused``: the model cannot be trained.
        fact: the measurement, and the action taken.
    """

    check: str
    outcome: Outcome
    fact: str


@dataclass(frozen=True)
class SkippedModule:
    """A module with parameters that a forward calls only for some samples.

    Attributes:
        module: name of the module, with ``*`` for indices in module lists.
        parent: name of the nearest outer module that every forward calls.
        takes: sizes of its arguments when they are empty.
        problem: why it cannot be called on empty arguments; empty string: it can.
    """

    module: str
    parent: str
    takes: tuple[tuple[int, ...], ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class StageContract:
    """Where a foundation may be cut into pipeline stages. A cut is named by the index of the block after it.

    Attributes:
        problem: why it cannot be cut anywhere; empty: it can.
        cuts: the cuts at which the loss and all gradients equal those of the whole model.
        refused: other cut -> what was measured there.
        needs_embeddings: every stage needs the input embeddings, with their media; otherwise only the first does.
        levels: side features (deepstack levels) -> index of the block after which the model adds them. A side feature
            without an entry is needed on every stage.
        returns: number of entries that a block returns, and the index of the hidden states among them; None: it returns
            only the hidden states.
        readers: parameter outside of blocks -> the stages that read it: ``first``, ``inner``, ``last``.
    """

    problem: str = ""
    cuts: tuple[int, ...] = ()
    refused: dict[int, str] = field(default_factory=dict)
    needs_embeddings: bool = False
    levels: dict[str, int] = field(default_factory=dict)
    returns: tuple[int, int] | None = None
    readers: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def require(self, model: str, cut: int) -> None:
        """Refuse a cut at which the model would not be exact.

        ``model``: name of the model, for the message; ``cut``: index of the block after it; 0 and the number of blocks
        are the ends of the model. Raises UserError: names the model, the cut and the measurement.
        """
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
    """How a foundation must be run so that training it is exact.

    Attributes:
        attention: ``omnitrain``: omnitrain's registered attention; ``native``: the model's own, which cannot pack.
        head: ``inside``: the loss is computed in the head; ``plain``: on the logits that the model returns.
        packs: whether several samples may share a pack.
        segmented: names of module classes that run one sample at a time, because they carry state along the sequence.
        by_sample: modalities encoded one sample at a time, because the tower mixes the items of a call.
        tokenwise: modules in which each token of the output reaches only the same token of the last hidden states;
            items of a module list are named by their index from the end.
        without_tails: whether tokens after the last supervised token can be skipped.
        skipped_modules: modules that some samples skip, in the order of a forward that skips none.
        read_outside: modules whose parameters are read while they do not run, with ``*`` for indices in module lists.
        beyond_text: modules and bare parameters without a gradient from text and from media that are encoded outside
            the forward; ``*`` for indices in module lists.
        findings: the result of every check.
    """

    attention: Literal["omnitrain", "native"] = "omnitrain"
    head: Literal["inside", "plain"] = "inside"
    packs: bool = True
    segmented: tuple[str, ...] = ()
    by_sample: tuple[str, ...] = ()
    tokenwise: tuple[str, ...] = ()
    without_tails: bool = False
    skipped_modules: tuple[SkippedModule, ...] = ()
    read_outside: tuple[str, ...] = ()
    beyond_text: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()

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

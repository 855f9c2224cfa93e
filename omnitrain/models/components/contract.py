"""What the contract check found out about a foundation, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

Outcome = Literal["passed", "fallback", "left out", "refused"]


@dataclass(frozen=True)
class Finding:
    """One check.

    Attributes:
        check: its name, as in docs/models.md.
        outcome: ``passed``; ``fallback``: something slower is used, which is exact; ``left out``: of what transformers
            would train, this is not trained; ``refused``: cannot be trained.
        fact: what was measured, and what is done about it.
    """

    check: str
    outcome: Outcome
    fact: str


@dataclass(frozen=True)
class SkippedModule:
    """A module with parameters that a forward calls for some samples only.

    Attributes:
        module: its name, with ``*`` for places in module lists.
        parent: of the nearest module around it that every forward calls.
        takes: sizes of its arguments where there is nothing for it.
        problem: why it cannot be called on nothing; empty: it can.
    """

    module: str
    parent: str
    takes: tuple[tuple[int, ...], ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class Contract:
    """How a foundation has to be run so that training it is exact.

    Attributes:
        attention: ``omnitrain``: through the registered entry point; ``native``: the model's own, which cannot pack.
        head: ``inside``: the loss is computed in the head; ``plain``: on the logits that the model returns.
        packs: several samples may share a row.
        segmented: names of module classes that run one sample at a time, because they carry state along the row.
        by_sample: modalities encoded one sample at a time, because the tower mixes the items of a call.
        row_local: modules of which a row reaches the same row of the last hidden states only; items of a module list
            are named by their place from its end.
        without_tails: what comes behind the last token that a loss reads makes no difference.
        skipped_modules: modules that some samples leave out, in the order of a forward that leaves nothing out.
        read_outside: modules whose parameters are read while they do not run, with ``*`` for places in module lists.
        without_gradient: parameters of the twin that no loss reaches.
        beyond_text: modules and bare parameters that no sample of text, or of media with rows of their own, reaches;
            ``*`` for places in module lists.
        findings: every check with what it measured.
    """

    attention: Literal["omnitrain", "native"] = "omnitrain"
    head: Literal["inside", "plain"] = "inside"
    packs: bool = True
    segmented: tuple[str, ...] = ()
    by_sample: tuple[str, ...] = ()
    row_local: tuple[str, ...] = ()
    without_tails: bool = False
    skipped_modules: tuple[SkippedModule, ...] = ()
    read_outside: tuple[str, ...] = ()
    without_gradient: tuple[str, ...] = ()
    beyond_text: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def refusals(self) -> tuple[Finding, ...]:
        """What makes the model untrainable here."""
        return tuple(finding for finding in self.findings if finding.outcome == "refused")

    @property
    def why_unpacked(self) -> str:
        """The fact behind ``packs = False``; empty where samples may be packed."""
        return next((f.fact for f in self.findings if f.check == "packing" and f.outcome != "passed"), "")

    def noting(self, check: str, outcome: Outcome, fact: str, **changes: Any) -> Contract:
        """This contract with one more finding, and fields changed by it."""
        return replace(self, findings=(*self.findings, Finding(check, outcome, fact)), **changes)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Contract:
        """The contract of which ``values`` are ``asdict``, lists for tuples."""
        lists = {key: tuple(value) for key, value in values.items() if isinstance(value, (list, tuple))}
        lists["findings"] = tuple(Finding(**finding) for finding in values["findings"])
        lists["skipped_modules"] = tuple(
            SkippedModule(**found | {"takes": tuple(map(tuple, found["takes"]))}) for found in values["skipped_modules"]
        )
        return cls(**values | lists)

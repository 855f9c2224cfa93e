"""Layouts as short strings: ``dp4``, ``hsdp2x2``, ``dp2.accum2.recompute``, ``tp2.dp2``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

from omnitrain.errors import UserError
from omnitrain.recipe.parallel import ComponentPlan, ParallelPlan
from omnitrain.recipe.suggest import nearest

# Word -> field, in the order in which a layout is written: some before the word of data parallelism, some behind it.
_BEFORE = {"pp": "pp", "tp": "tp"}
_BEHIND = {"cp": "cp", "sp": "ulysses", "ep": "ep", "accum": "accumulation"}
_DEGREES = ("dp_replicate", "dp_shard", "tp", "ulysses", "cp", "ep", "pp")
_FLAGS = ("recompute", "offload")
_NUMBERED = ("dp", "replicate", *_BEFORE, *_BEHIND)
_EXAMPLES = {word: f"{word}2" for word in _NUMBERED} | {"hsdp": "hsdp2x2"} | {flag: flag for flag in _FLAGS}


@dataclass(frozen=True)
class Layout:
    """One way to train: degrees, and what else must not change the numbers.

    Attributes:
        dp_replicate: copies of the parameters.
        dp_shard: ranks over which a copy is sharded.
        tp: tensor parallel ranks.
        ulysses: ranks that share a sequence by swapping it for heads.
        cp: ranks that share a sequence in a ring.
        ep: expert parallel ranks, among those of data and sequence.
        pp: pipeline stages.
        mode: how the parameters lie on the data ranks.
        accumulation: micro-batches per optimizer step.
        recompute: activations are computed again in the backward.
        offload: activations, parameters and optimizer state live in CPU memory.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    ulysses: int = 1
    cp: int = 1
    ep: int = 1
    pp: int = 1
    mode: Literal["fsdp2", "hsdp", "replicate"] = "fsdp2"
    accumulation: int = 1
    recompute: bool = False
    offload: bool = False

    def __post_init__(self) -> None:
        """Numbers are whole, from 1.

        Raises:
            UserError: one that is not.
        """
        for field in (*_DEGREES, "accumulation"):
            found = getattr(self, field)
            if not isinstance(found, int) or isinstance(found, bool) or found < 1:
                raise UserError(f"layout: {field} is {found!r}; expected a whole number from 1")

    @property
    def num_ranks(self) -> int:
        """Ranks that it takes; experts are spread over ranks that exist anyway."""
        return math.prod((self.dp_replicate, self.dp_shard, self.tp, self.ulysses, self.cp, self.pp))

    def plan(self) -> ParallelPlan:
        """The parallel plan with this layout for all components."""
        degrees = {axis: getattr(self, axis) for axis in _DEGREES}
        shards = self.mode != "replicate"
        return ParallelPlan(
            default=ComponentPlan(
                **degrees,
                mode=self.mode,
                recompute="full" if self.recompute else None,
                activation_offload=self.offload or None,
                parameter_offload=(self.offload and shards) or None,
                optimizer_offload=self.offload or None,
            )
        )

    def __str__(self) -> str:
        data = {
            "fsdp2": f"dp{self.dp_shard}" if self.dp_shard > 1 else "",
            "hsdp": f"hsdp{self.dp_replicate}x{self.dp_shard}",
            "replicate": f"replicate{self.dp_replicate}",
        }
        words = [*self._degrees(_BEFORE), data[self.mode], *self._degrees(_BEHIND)]
        words += [flag for flag in _FLAGS if getattr(self, flag)]
        return ".".join(filter(None, words)) or "dp1"

    def _degrees(self, fields: dict[str, str]) -> list[str]:
        return [f"{word}{size}" for word, field in fields.items() if (size := getattr(self, field)) > 1]


def parse_layout(text: str) -> Layout:
    """Read a layout: words joined by dots, in any order.

    ``dpN`` (FSDP over N ranks), ``hsdpAxB`` (A copies, each over B ranks), ``replicateN``, ``tpN``, ``spN`` (Ulysses),
    ``cpN``, ``epN``, ``ppN``, ``accumN`` (micro-batches per step), ``recompute``, ``offload``.

    Raises:
        UserError: every word that is not one of these, or that says something twice, with the valid ones.
    """
    if not isinstance(text, str):
        raise UserError(f"layout: found {text!r}; expected words such as 'dp2', joined by dots")
    fields: dict[str, Any] = {}
    problems = []
    for word in text.split("."):
        read = _read(word)
        if read is None:
            problems.append(_unknown(word))
        elif read.keys() & fields.keys():
            problems.append(f"`{word}`: {' and '.join(sorted(read.keys() & fields.keys()))} set twice")
        else:
            fields |= read
    if problems:
        words = ", ".join(_EXAMPLES.values())
        raise UserError("\n  ".join([f"layout {text!r}: expected words such as {words}, joined by dots", *problems]))
    return Layout(**fields)


def _read(word: str) -> dict[str, Any] | None:
    if word in _FLAGS:
        return {word: True}
    found = re.fullmatch(r"([a-z]+)([1-9]\d*)(?:x([1-9]\d*))?", word)
    if found is None:
        return None
    name, first, second = found[1], int(found[2]), found[3]
    if name == "hsdp" and second is not None:
        return {"mode": "hsdp", "dp_replicate": first, "dp_shard": int(second)}
    if second is not None:
        return None
    if name == "dp":
        return {"mode": "fsdp2", "dp_shard": first}
    if name == "replicate":
        return {"mode": "replicate", "dp_replicate": first}
    field = (_BEFORE | _BEHIND).get(name)
    return None if field is None else {field: first}


def _unknown(word: str) -> str:
    close = nearest(re.sub(r"\d.*", "", word), _EXAMPLES)
    return f"`{word}`: not understood" + (f"; did you mean a word like `{_EXAMPLES[close]}`?" if close else "")

"""Layouts as short strings: ``dp4``, ``hsdp2x2``, ``dp2.accum2.recompute``, ``tp2.dp2``, ``vision1+dp2``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import starmap
from typing import Any, Literal

from omnitrain.errors import UserError
from omnitrain.recipe.parallel import ComponentPlan, ParallelPlan, Section
from omnitrain.recipe.suggest import nearest

# Word -> field, in written order: some words come before the word of data parallelism, some after it.
_BEFORE = {"pp": "pp", "v": "chunks", "tp": "tp"}
_AFTER = {"cp": "cp", "sp": "ulysses", "ep": "ep", "accum": "accumulation", "window": "window"}
_DEGREES = ("dp_replicate", "dp_shard", "tp", "ulysses", "cp", "ep", "pp")
# Word without a number -> the keys of a plan that it sets; of two words for one key, the first decides.
_FLAGS: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule.kind": "gpipe"},
    "zbv": {"schedule.kind": "zbv"},
    "paired": {"schedule.overlap": True},
    "recompute": {"memory.recompute": "full"},
    "offload": {"memory.offload": ["activations", "parameters", "optimizer"]},
    "world": {"place": "world"},
    "group": {"place": "group"},
    "bf16": {"precision.compute": "bfloat16"},
    "bf16_param": {"precision.param": "bfloat16"},
}
# Word -> the field of its number, and what else it sets.
_NUMBERED: dict[str, tuple[str, dict[str, str]]] = {
    "dp": ("dp_shard", {"mode": "fsdp2"}),
    "replicate": ("dp_replicate", {"mode": "replicate"}),
    **{word: (field, {}) for word, field in {**_BEFORE, **_AFTER}.items()},
}
# Word of a section -> its components; another word is the name of a component.
_SECTIONS = {
    "vision": ["image_encoder"],
    "audio": ["audio_encoder"],
    "encoders": ["image_encoder", "audio_encoder"],
    "vision_tower": ["image_encoder.tower"],
    "audio_tower": ["audio_encoder.tower"],
    "towers": ["image_encoder.tower", "audio_encoder.tower"],
    "vision_projector": ["image_encoder.projector"],
    "audio_projector": ["audio_encoder.projector"],
    "projectors": ["image_encoder.projector", "audio_encoder.projector"],
}
_FLAGS_OF_SECTION: dict[str, tuple[str, Any]] = {
    "twice": ("encode_twice", True),
    "ahead": ("ahead", 1),
    "nixl": ("carrier", "nixl"),
}
_OF_SECTION = {"window": "micro_batch", "slots": "slots", "flight": "in_flight"}
_EXAMPLES = {word: f"{word}2" for word in _NUMBERED} | {"hsdp": "hsdp2x2"} | {flag: flag for flag in _FLAGS}


@dataclass(frozen=True)
class Layout:
    """A way to distribute training, which must not change its result: the words of :func:`parse_layout`, by field."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    ulysses: int = 1
    cp: int = 1
    ep: int = 1
    pp: int = 1
    chunks: int = 1
    gpipe: bool = False
    zbv: bool = False
    paired: bool = False
    mode: Literal["fsdp2", "hsdp", "replicate"] = "fsdp2"
    accumulation: int = 1
    recompute: bool = False
    offload: bool = False
    world: bool = False
    group: bool = False
    bf16: bool = False
    bf16_param: bool = False
    window: int = 1
    sections: tuple[tuple[str, Section], ...] = ()

    def __post_init__(self) -> None:
        """Raise a UserError if a degree is not an integer of at least 1."""
        for field in (*_DEGREES, "chunks", "accumulation", "window"):
            degree = getattr(self, field)
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise UserError(f"layout: {field} is {degree!r}; expected a whole number from 1")

    @property
    def num_ranks(self) -> int:
        """Number of ranks, those of sections included; ``ep`` uses ranks of the other degrees."""
        of_main = math.prod((self.dp_replicate, self.dp_shard, self.tp, self.ulysses, self.cp, self.pp))
        return of_main + sum(section.ranks for _, section in self.sections)

    def plan(self) -> ParallelPlan:
        """Return the parallel plan with this layout for all components."""
        fields: dict[str, Any] = {axis: getattr(self, axis) for axis in _DEGREES} | {"mode": self.mode}
        found: dict[str, Any] = {"schedule.chunks": self.chunks} if self.chunks > 1 else {}
        found |= {"encode.window": self.window} if self.window > 1 else {}
        for flag in reversed(_FLAGS):
            found |= _FLAGS[flag] if getattr(self, flag) else {}
        if self.offload and self.mode == "replicate":  # only shards can be offloaded
            found["memory.offload"] = ["activations", "optimizer"]
        for key, value in found.items():
            node, _, inner = key.partition(".")
            fields |= {node: fields.get(node, {}) | {inner: value}} if inner else {key: value}
        return ParallelPlan(default=ComponentPlan(**fields), sections=dict(self.sections))

    def __str__(self) -> str:
        data = {
            "fsdp2": f"dp{self.dp_shard}" if self.dp_shard > 1 else "",
            "hsdp": f"hsdp{self.dp_replicate}x{self.dp_shard}",
            "replicate": f"replicate{self.dp_replicate}",
        }
        words = [*self._degrees(_BEFORE), data[self.mode], *self._degrees(_AFTER)]
        words += [flag for flag in _FLAGS if getattr(self, flag)]
        return "+".join([*starmap(_section_words, self.sections), ".".join(filter(None, words)) or "dp1"])

    def _degrees(self, fields: dict[str, str]) -> list[str]:
        return [f"{word}{size}" for word, field in fields.items() if (size := getattr(self, field)) > 1]


def parse_layout(text: str) -> Layout:
    """Parse a layout: words joined by dots, in any order; before them, each with a ``+``, sections.

    ``dpN`` (FSDP over N ranks), ``hsdpAxB`` (A copies, each over B ranks), ``replicateN``, ``tpN``, ``spN`` (Ulysses),
    ``cpN``, ``epN``, ``ppN`` (pipeline ranks), ``vN`` (pipeline stages per rank), ``gpipe``, ``zbv``, ``paired``
    (``overlap`` of the schedule), ``accumN`` (micro-batches per step), ``recompute``, ``offload``, ``world`` and
    ``group`` (``place``), ``windowN`` (micro-batches whose items are encoded together), ``bf16`` (compute in bf16, with
    fp32 weights), ``bf16_param`` (bf16 weights).

    ``vision1+dp2``: the image encoder has a rank of its own, the rest of the model two. The word of a section is
    ``vision``, ``audio``, ``encoders`` (both, together), ``vision_tower``, ``vision_projector`` (and so for ``audio``),
    ``towers``, ``projectors`` (both) or the name of a component, with its number of ranks. Further words of a section:
    ``twice`` (``encode_twice``), ``ahead``, ``nixl`` (``carrier``), ``windowN`` (``micro_batch``), ``slotsN``,
    ``flightN`` (``in_flight``).

    Raises UserError: a word is unknown or sets a field twice; lists all such words, and the valid ones.
    """
    if not isinstance(text, str):
        raise UserError(f"layout: found {text!r}; expected words such as 'dp2', joined by dots")
    *sections, main = text.split("+")
    fields: dict[str, Any] = {}
    problems = []
    parsed_sections = []
    for section in sections:
        if (found := _parse_section(section)) is None:
            problems.append(f"`{section}`: not understood; a section looks like `vision1` or `vision1.twice.window2`")
        else:
            parsed_sections.append(found)
    for word in main.split("."):
        parsed = _parse_word(word)
        if parsed is None:
            close = nearest(re.sub(r"\d.*", "", word), _EXAMPLES)
            advice = f"; did you mean a word like `{_EXAMPLES[close]}`?" if close else ""
            problems.append(f"`{word}`: not understood{advice}")
        elif parsed.keys() & fields.keys():
            problems.append(f"`{word}`: {' and '.join(sorted(parsed.keys() & fields.keys()))} set twice")
        else:
            fields |= parsed
    if problems:
        words = ", ".join(_EXAMPLES.values())
        raise UserError("\n  ".join([f"layout {text!r}: expected words such as {words}, joined by dots", *problems]))
    return Layout(**fields, sections=tuple(parsed_sections))


def _parse_section(text: str) -> tuple[str, Section] | None:
    first, *words = text.split(".")
    match = re.fullmatch(r"([a-z]\w*?)([1-9]\d*)", first)
    if match is None:
        return None
    fields: dict[str, Any] = {}
    for word in words:
        setting = re.fullmatch(r"([a-z]+)([1-9]\d*)", word)
        if word in _FLAGS_OF_SECTION:
            field, value = _FLAGS_OF_SECTION[word]
            fields[field] = value
        elif setting is not None and setting[1] in _OF_SECTION:
            fields[_OF_SECTION[setting[1]]] = int(setting[2])
        else:
            return None
    name = match[1]
    return name, Section(components=_SECTIONS.get(name, [name]), ranks=int(match[2]), **fields)


def _section_words(name: str, section: Section) -> str:
    numbers = [
        f"{word}{value}"
        for word, field in _OF_SECTION.items()
        if (value := getattr(section, field)) != Section.model_fields[field].default
    ]
    flags = [word for word, (field, value) in _FLAGS_OF_SECTION.items() if getattr(section, field) == value]
    return ".".join([f"{name}{section.ranks}", *flags, *numbers])


def _parse_word(word: str) -> dict[str, Any] | None:
    if word in _FLAGS:
        return {word: True}
    if match := re.fullmatch(r"hsdp([1-9]\d*)x([1-9]\d*)", word):
        return {"mode": "hsdp", "dp_replicate": int(match[1]), "dp_shard": int(match[2])}
    match = re.fullmatch(r"([a-z]+)([1-9]\d*)", word)
    if match is None or match[1] not in _NUMBERED:
        return None
    field, others = _NUMBERED[match[1]]
    return {field: int(match[2]), **others}

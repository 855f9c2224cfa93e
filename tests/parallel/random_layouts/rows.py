"""Random layouts: a row is a model, how it is spread over ranks, what trains, and how. One line of text names a row."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from omnitrain.recipe import ComponentPlan, ParallelPlan
from omnitrain.recipe.layout import Layout, parse_layout
from omnitrain.recipe.plan_groups import Lora

STEPS = 2
EMPTY = "-"  # an empty field in a line
ALL = ("foundation", "encoders", "decoders")


@dataclass(frozen=True)
class Trained:
    """What trains, by kinds of components.

    Attributes:
        frozen: frozen by the plan; ``one``: the first encoder.
        held: whose parameters need no gradient before the plan.
        lora: that have adapters with values, before the plan.
        planned: that get adapters by the plan, which begin with zeros.
        targets: globs of the adapted matrices.
    """

    frozen: tuple[str, ...] = ()
    held: tuple[str, ...] = ()
    lora: tuple[str, ...] = ()
    planned: tuple[str, ...] = ()
    targets: tuple[str, ...] = ("*",)

    @property
    def without_matrices(self) -> bool:
        """Whether no matrix of a hidden layer may train, which Muon refuses."""
        return bool(self.lora or self.planned)

    @property
    def adapters(self) -> Lora:
        return Lora(targets=list(self.targets), rank=3, alpha=6.0)


TRAINED = {
    "all": Trained(),
    "frozen": Trained(frozen=("encoders",)),
    "frozen-one": Trained(frozen=("one",)),
    "frozen-foundation": Trained(frozen=("foundation",)),
    "frozen-decoders": Trained(frozen=("decoders",)),
    "encoders": Trained(held=("foundation",)),
    "lora": Trained(lora=("foundation", "encoders")),
    "lora-foundation": Trained(lora=("foundation",)),
    "lora-encoders": Trained(lora=("encoders",)),
    "lora-experts": Trained(lora=("foundation",), targets=("experts.*",)),
    "planned-lora": Trained(planned=("foundation", "encoders")),
    "planned-experts": Trained(planned=("foundation",), targets=("experts.*",)),
}


@dataclass(frozen=True)
class Family:
    """What a model can be asked for; omnitrain refuses the rest in words.

    Attributes:
        encoders: components that read media.
        decoders: components that write media.
        sections: words of sections for them.
        tensor: whether transformers has a tensor parallel plan for its layers.
        experts: whether expert parallelism can share its experts.
        deep: whether its layers can be repeated, for pipelines of four stages.
        moves: whether other ranks than those of a sample may encode its items.
        shares: whether several ranks can share an item.
    """

    encoders: tuple[str, ...] = ()
    decoders: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    tensor: bool = False
    experts: bool = False
    deep: bool = True
    moves: bool = True
    shares: bool = False


_IMAGE: dict[str, Any] = {"encoders": ("image_encoder",), "sections": ("vision",)}
_OMNI: dict[str, Any] = {"encoders": ("image_encoder", "audio_encoder")}
_OMNI |= {"sections": ("vision", "audio", "encoders", "vision+audio")}
FAMILIES: dict[str, Family] = {
    "qwen3": Family(tensor=True),
    "qwen3_moe": Family(tensor=True, experts=True),
    "deepseek_v3": Family(tensor=True, experts=True),
    "glm4_moe": Family(experts=True),
    "gpt_oss": Family(experts=True),
    "qwen3_next": Family(experts=True),
    "gemma4_moe": Family(experts=True, deep=False),
    "qwen3_vl": Family(**_IMAGE, shares=True),
    "qwen3_vl_moe": Family(**_IMAGE, experts=True, shares=True),
    "ernie4_5_vl_moe": Family(**_IMAGE, experts=True, shares=True),
    "qwen3_5": Family(**_IMAGE, tensor=True, shares=True),
    "qwen2_5_vl": Family(**_IMAGE, shares=True),
    "internvl": Family(**_IMAGE, tensor=True),
    "gemma3": Family(**_IMAGE, tensor=True),
    "llava_onevision": Family(encoders=("image_encoder",), moves=False),
    "qwen2_5_omni_thinker": Family(**_OMNI, tensor=True),
    "qwen3_omni_moe_thinker": Family(**_OMNI, tensor=True, experts=True),
    # Attached encoders and decoders: the second reads media and writes text; teachers read text.
    "any_to_any": Family(
        encoders=_OMNI["encoders"],
        decoders=("image_decoder", "audio_decoder"),
        sections=(*_OMNI["sections"], "vision_tower", "towers"),
        tensor=True,
    ),
    "reading": Family(**_OMNI, tensor=True),
    "taught": Family(sections=("big",)),
    "taught_by_experts": Family(sections=("big",)),
    "granite_speech": Family(encoders=("audio_encoder",)),
    "llama4": Family(**_IMAGE),
}
WEIGHTS = {"any_to_any": 3, "qwen3_moe": 2, "qwen3_vl_moe": 2, "granite_speech": 0, "llama4": 0}


class Row(NamedTuple):
    """A layout of a model; an empty field is written as ``-``.

    Attributes:
        model: a key of :data:`FAMILIES`.
        layout: words of :func:`parse_layout`.
        place: the rank that encodes an item, with the micro-batches of a window (``world.2``).
        trained: a key of :data:`TRAINED`.
        optimizer: ``sgd``, ``adamw``, ``muon``, ``int8``.
        precision: ``fp32``, or the field of a plan's precision that is bf16: ``compute``.
        packs: how the samples of a step lie on ranks: ``even``, ``uneven``, ``empty`` (one rank has none), ``silent``
            (nothing trains in the first step), ``text`` (no media in the last step).
        settings: further words: see :data:`SETTINGS`.
        seed: of the samples of each step.
    """

    model: str
    layout: str
    place: str
    trained: str
    optimizer: str
    precision: str
    packs: str
    settings: str
    seed: int

    def __str__(self) -> str:
        return " ".join(str(value) or EMPTY for value in self)

    @classmethod
    def parse(cls, line: str) -> Row:
        *words, seed = (word.replace(EMPTY, "") if word == EMPTY else word for word in line.split())
        return cls(*words, seed=int(seed))  # type: ignore[arg-type]

    @property
    def parsed(self) -> Layout:
        return parse_layout(self.layout)

    @property
    def words(self) -> list[str]:
        return self.settings.split(",") if self.settings else []

    @property
    def blocks(self) -> int:
        """Number of blocks of the foundation: those of the family, or four where there are as many stages."""
        return 4 if self.num_stages > 2 else 2

    @property
    def num_stages(self) -> int:
        layout = self.parsed
        return layout.pp * (2 if layout.zbv else layout.chunks)

    @property
    def num_data_ranks(self) -> int:
        layout = self.parsed
        return layout.dp_replicate * layout.dp_shard

    def components(self, kinds: Collection[str]) -> list[str]:
        """The components of these kinds, towers and projectors apart if sections divide them."""
        family = FAMILIES[self.model]
        found = {"foundation": ["foundation"], "decoders": list(family.decoders), "encoders": [], "one": []}
        for encoder in family.encoders:
            parts = [f"{encoder}.tower", f"{encoder}.projector"] if self._is_divided(encoder) else [encoder]
            found["encoders"] += parts
            found["one"] += parts if encoder == family.encoders[0] else []
        return [name for kind in kinds for name in found[kind]]

    def plan(self) -> ParallelPlan:
        """The plan of all components."""
        plan, trained = self.parsed.plan(), TRAINED[self.trained]
        own: dict[str, dict[str, Any]] = {"foundation": {}}
        for word in self.words:
            own["foundation"] = _merged(own["foundation"], SETTINGS[word])
        in_main = [name for name in FAMILIES[self.model].encoders if plan.section_of(name) == "main"]
        own |= {name: self._fields_of_place() for name in in_main if not self._is_divided(name)}
        if "calls" in self.words:
            for name in FAMILIES[self.model].encoders:
                if not self._is_divided(name):
                    own[name] = _merged(own.get(name, {}), {"encode": {"call_elements": 400}})
        for name in self.components(trained.planned):
            own.setdefault(name, {})["lora"] = trained.adapters
        for name in self.components(trained.frozen):
            own.setdefault(name, {})["freeze"] = True
        default = plan.default
        if self.precision != "fp32":
            default = default.changed({f"precision.{self.precision}": "bfloat16"})
        components = {name: ComponentPlan(**fields) for name, fields in own.items() if fields}
        return ParallelPlan(default=default, components=components, sections=plan.sections)

    def _fields_of_place(self) -> dict[str, Any]:
        place, _, window = self.place.partition(".")
        if place == "shared":
            return {"ulysses": self.parsed.ulysses * self.parsed.cp}
        if place == "replicate":
            return {"mode": "replicate"}
        found: dict[str, Any] = {"place": place} if place else {}
        return found | ({"encode": {"window": int(window) if window.isdecimal() else window}} if window else {})

    def _is_divided(self, encoder: str) -> bool:
        return encoder in self.parsed.plan().divided_encoders()

    def cells(self, kinds: Sequence[str]) -> Iterator[list[list[list[int]]]]:
        """Yield for each step ``[data rank][micro-batch][...]``, the numbers of samples in a pack.

        Args:
            kinds: of each sample: ``text``, ``media`` or ``silent``.
        """
        rng, ranks = np.random.default_rng(self.seed), self.num_data_ranks
        layout = self.parsed
        most = max(2, 2 * layout.pp - 1) if layout.zbv else max(2, layout.pp)
        for step in range(STEPS):
            wanted = {("silent", 0): "silent", ("text", STEPS - 1): "text"}.get((self.packs, step))
            numbers = [index for index, kind in enumerate(kinds) if wanted in (None, kind)]
            sizes = [most] * ranks if self.packs == "even" else rng.integers(1, most + 1, ranks).tolist()
            first = int(rng.integers(ranks))
            sizes[first] = most  # as many as a schedule needs
            if self.packs == "empty" and ranks > 1:
                sizes[(first + 1 + step % (ranks - 1)) % ranks] = 0
            cells = [[[int(rng.choice(numbers))] for _ in range(size)] for size in sizes]
            packs = [pack for of_rank in cells for pack in of_rank]
            for _ in range(int(rng.integers(0, len(packs) + 1))):
                packs[int(rng.integers(len(packs)))].append(int(rng.choice(numbers)))
            yield cells


# Word -> fields of the foundation's plan.
SETTINGS: dict[str, dict[str, Any]] = {
    "compile": {"compile": True},
    "sequence": {"sequence_parallel": True},
    "async": {"async_ulysses": True},
    "chunks": {"experts": {"chunks": 2}},
    "delay": {"experts": {"delay_wgrad": True}},
    "rows": {"experts": {"rows": 8}},
    "parts": {"memory": {"recompute": "parts"}},
    "selective": {"memory": {"recompute": "selective"}},
    "tensors": {"memory": {"offload": ["mlp_input"]}},
    "clip": {},
    "calls": {},
    "deal": {"place": "world"},
    "weights": {},  # of losses
    "again": {},  # two calls of accumulate_gradients before an update
}


def _merged(fields: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Both, with the keys of both in a group."""
    groups = {key: {**fields[key], **value} for key, value in more.items() if key in fields and isinstance(value, dict)}
    return {**fields, **more, **groups}


def draw(seed: int, number: int, optimizers: Sequence[str] = ("sgd", "adamw", "muon")) -> list[Row]:
    """``number`` rows, no two alike."""
    rng, rows = np.random.default_rng(seed), dict[Row, None]()
    while len(rows) < number:
        rows[_drawn(rng, optimizers)] = None
    return list(rows)


def _pick(rng: np.random.Generator, weights: Mapping[str, float]) -> str:
    total = sum(weights.values())
    return str(rng.choice(list(weights), p=[weight / total for weight in weights.values()]))


def _drawn(rng: np.random.Generator, optimizers: Sequence[str]) -> Row:
    model = _pick(rng, {name: WEIGHTS.get(name, 1) for name in FAMILIES})
    family = FAMILIES[model]
    world = int(_pick(rng, {"2": 9, "4": 9, "8": 2}))
    chances = {"all": 6.0, "lora": 2, "planned-lora": 1}
    if family.encoders:
        chances |= dict.fromkeys(("frozen", "frozen-foundation", "encoders", "lora-foundation", "lora-encoders"), 1)
    if len(family.encoders) > 1:
        chances["frozen-one"] = 1
    if family.decoders:
        chances["frozen-decoders"] = 1
    if family.experts:
        chances |= {"lora-experts": 2, "planned-experts": 1}
    trained = _pick(rng, chances)
    sections, left = _sections(rng, family, world, trained)
    main, axes = _main(rng, family, left)
    place = _place(rng, family, axes) if family.encoders and not sections else ""
    optimizer = str(
        rng.choice([name for name in optimizers if not TRAINED[trained].without_matrices or name != "muon"])
    )
    packs = _pick(rng, {"even": 4, "uneven": 4, "empty": 2, "silent": 1, "text": 1 if family.encoders else 0})
    settings = _settings(rng, family, axes, "+".join([*sections, main]), trained)
    layout = "+".join([*sections, main])
    precision = "compute" if not family.experts and rng.random() < 0.3 else "fp32"
    return Row(model, layout, place, trained, optimizer, precision, packs, settings, int(rng.integers(1000)))


def _sections(rng: np.random.Generator, family: Family, world: int, trained: str) -> tuple[list[str], int]:
    """Words of sections, and the ranks that are left for ``main``."""
    if not family.sections or rng.random() > 0.35:
        return [], world
    word = str(rng.choice(family.sections))
    left, words = world, []
    for name in word.split("+"):
        ranks = 1 if left <= 2 or rng.random() < 0.6 else 2
        if left - ranks < 1:
            break
        left -= ranks
        is_frozen = name == "big" or trained == "frozen"
        setting = _pick(rng, {"": 3, "window2": 1, "slots1": 1} | ({"ahead": 2} if is_frozen else {"twice": 1}))
        words.append(f"{name}{ranks}" + (f".{setting}" if setting else ""))
    return words, left


def _main(rng: np.random.Generator, family: Family, ranks: int) -> tuple[str, dict[str, int]]:
    """The layout's words of ``main``, and axis -> degree."""
    names = ["dp", "pp", "sp", "cp", *(["tp"] if family.tensor else [])]
    if "big" in family.sections:
        names.remove("pp")
    axes = dict.fromkeys((*names, "tp"), 1)
    for factor in _factors(ranks):
        axis = _pick(rng, {name: 3 if name in ("dp", "pp") else 1 for name in names})
        largest = {"tp": 2, "pp": 4 if family.deep else 2}.get(axis, 8)
        axis = axis if axes[axis] * factor <= largest and factor == 2 else "dp"
        axes[axis] *= factor
    words = [f"{axis}{axes[axis]}" for axis in ("pp", "tp") if axes.get(axis, 1) > 1]
    if axes["dp"] > 1:
        copies = [f"dp{axes['dp']}", f"replicate{axes['dp']}"]
        copies += [f"hsdp2x{axes['dp'] // 2}"] if axes["dp"] % 2 == 0 else []
        words.append(copies[int(rng.choice(3, p=[0.6, 0.2, 0.2])) % len(copies)])
    words += [f"{axis}{axes[axis]}" for axis in ("cp", "sp") if axes[axis] > 1]
    axes["ep"] = 1
    copies = {"replicate": axes["dp"], "hsdp": 2}.get(next(iter(re.findall("replicate|hsdp", "".join(words))), ""), 1)
    shared = axes["dp"] // copies * axes["cp"] * axes["sp"]
    if family.experts and shared % 2 == 0 and rng.random() < 0.8:
        axes["ep"] = 4 if shared % 4 == 0 and rng.random() < 0.3 else 2
        words.append(f"ep{axes['ep']}")
    if axes.get("pp", 1) > 1:
        deep = family.deep and axes["pp"] == 2
        schedule = _pick(rng, {"": 3, "gpipe": 1} | ({"v2": 2, "zbv": 2} if deep else {}))
        words.append(schedule)
    if axes["ep"] > 1 and not {"gpipe", "zbv"} & set(words) and rng.random() < 0.25:
        words.append("paired")
    words.append(_pick(rng, {"": 6, "recompute": 2, "offload": 1}))
    return ".".join(filter(None, words)) or "dp1", axes


def _factors(number: int) -> list[int]:
    found = []
    for prime in (2, 3, 5, 7):
        while number % prime == 0:
            found.append(prime)
            number //= prime
    return found


def _place(rng: np.random.Generator, family: Family, axes: Mapping[str, int]) -> str:
    if not family.moves:
        return _pick(rng, {"": 1, "local": 1})
    if axes.get("pp", 1) > 1:
        return _pick(rng, {"": 2, "local": 1, "world": 2, "world.1": 1, "world.2": 1})
    chances = {"": 2.0, "local": 1, "world": 2, "world.2": 1, "world.step": 1}
    if max(axes["sp"], axes["cp"], axes["tp"]) > 1:
        chances["group"] = 1
    if family.shares and axes["sp"] * axes["cp"] == 2:
        chances["shared"] = 2
    return _pick(rng, chances | ({"replicate": 1} if axes["dp"] > 1 else {}))


def _settings(rng: np.random.Generator, family: Family, axes: Mapping[str, int], main: str, trained: str) -> str:
    chances = {"clip": 0.3, "again": 0.15, "weights": 0.1}
    if axes["tp"] > 1:
        chances["sequence"] = 0.5
    if axes["sp"] > 1 and "lora" not in trained:
        chances["async"] = 0.5
    if axes["ep"] > 1:
        chances |= {"chunks": 0.25, "delay": 0.25}
    if family.experts:
        chances |= {"rows": 0.2}
    if family.encoders:
        chances |= {"calls": 0.15}
    if axes["dp"] > 1 and "+" not in main:
        chances |= {"deal": 0.15}
    if "recompute" not in main and "offload" not in main:
        chances |= {"parts": 0.1} if family.experts else {"selective": 0.1}
        chances |= {"tensors": 0.1} if family.experts else {}
    chosen = [word for word, chance in chances.items() if rng.random() < chance]
    return ",".join(word for word in chosen if not (word == "selective" and "tensors" in chosen))

"""``PackBudget``: the most that a pack may hold, in tokens and in what each encoder reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from omnitrain.data.packing.sample import Measure, Sample
from omnitrain.errors import UserError
from omnitrain.recipe.suggest import hint


@dataclass(frozen=True)
class PackBudget:
    """The most that a pack may hold; UserError: ``elements`` has a component that is not in ``media_names``."""

    tokens: int
    elements: Mapping[str, int] = field(default_factory=dict)  # component -> input elements; others have no limit
    media_names: Mapping[str, Sequence[str]] = field(default_factory=dict)  # component -> names of its media in a pack

    def __post_init__(self) -> None:
        if self.elements and not self.media_names:
            raise UserError("data.pack_elements: the media of the encoders are unknown; pass the model's `media_names`")
        problems = [
            f"data.pack_elements.{name}: unknown encoder; {hint(name, self.media_names)}"
            for name in sorted(self.elements.keys() - self.media_names.keys())
        ]
        if problems:
            raise UserError(*problems)

    @cached_property
    def limits(self) -> tuple[int, ...]:
        """Tokens, then the elements of each limited component."""
        return (self.tokens, *self.elements.values())

    def sizes(self, samples: Sequence[Sample | Measure]) -> list[list[int]]:
        """Return ``[limits][samples]``: how much of each of :attr:`limits` a sample takes."""
        found = [sample.elements for sample in samples] if self.elements else []
        of_components = [
            [sum([of_one.get(name, 0) for name in self.media_names[component]]) if of_one else 0 for of_one in found]
            for component in self.elements
        ]
        return [list(map(len, samples)), *of_components]

    def excess(self, sample: Sample | Measure) -> str:
        """Return why the sample alone exceeds the budget; empty: it does not."""
        if len(sample) > self.tokens:
            return f"{len(sample)} tokens, but a pack holds at most {self.tokens}"
        for (component, limit), (size,) in zip(self.elements.items(), self.sizes([sample])[1:], strict=True):
            if size > limit:
                return f"{component} reads {size:,} elements, but data.pack_elements allows {limit:,} in a pack"
        return ""

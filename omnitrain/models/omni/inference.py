"""Run an omni model without backwards, for held-out losses and generation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

from omnitrain.data.packing.pack import Pack
from omnitrain.models.components.outputs import OmniOutput
from omnitrain.models.foundation.encoded_pack import EncodedPack
from omnitrain.models.omni.stage import StageInput
from omnitrain.peers import SINGLE_PROCESS, Peers

T = TypeVar("T")


def encoded_prompts(model: Any, pack: Pack | EncodedPack) -> EncodedPack:
    """Encode a pack of prompts, and keep no longer what its media were encoded from."""
    encoded: EncodedPack = model.encode_media(pack)
    return replace(encoded, pack=replace(encoded.pack, inputs={}, targets={}), features={})


class Inference:
    """Runs a model without backwards; here, one that is whole on this rank.

    All ranks of a model must call every method, in the same order. Those that hold the same samples in a step of
    training have the same packs and prompts here.

    Attributes:
        peers: the ranks with other tokens.
        everyone: all ranks of the model, those that only encode for others, too.
        sharing: the ranks that share the tokens of a sequence in a step; each generates for some of their prompts.
        has_foundation: whether this rank runs the foundation, and does not only encode for others.
        is_cut: whether the foundation is cut into stages.
    """

    peers: Peers = SINGLE_PROCESS
    everyone: Peers = SINGLE_PROCESS
    sharing: Peers = SINGLE_PROCESS
    has_foundation = True
    is_cut = False

    def require(self, component: str) -> None:
        """Raise a UserError if this rank does not have a component, so that a plain forward cannot call it."""

    def require_heads(self, decoders: Collection[str]) -> None:
        """Raise a UserError if this rank runs the foundation, and not the ``decoders`` that draw tokens beside it."""

    def evaluate(
        self,
        model: Any,
        packs: Sequence[Pack],
        take: Callable[[Pack, OmniOutput], object],
        notify: Callable[[int], object],
    ) -> None:
        """Compute the losses of packs.

        Args:
            model: an :class:`omnitrain.models.omni.model.OmniModel`, in evaluation mode.
            packs: of this rank; may be empty.
            take: called with each pack and its output, on ranks with the last stage.
            notify: called with the number of packs so far, equally often on all ranks.
        """
        for number, pack in enumerate(packs):
            notify(number)
            on_device = pack.to(model.device)
            take(on_device, model(on_device))

    def encode(self, model: Any, packs: Sequence[Pack], wanted: Collection[int]) -> dict[int, EncodedPack]:
        """Return index of a pack -> the pack, encoded, for the ``wanted`` packs; on ranks with the first stage."""
        return {index: encoded_prompts(model, packs[index].to(model.device)) for index in wanted}

    def gathered(self, model: Any) -> AbstractContextManager[None]:
        """Return a context in which this rank uses weights outside of the blocks' forwards."""
        return nullcontext()

    def run(self, forward: Callable[[StageInput | None], Any]) -> Any:
        """Run the stages of this rank.

        Args:
            forward: runs one stage, and returns a tuple of tensors for the next one. None: it runs the whole model.

        Returns:
            What ``forward`` returns for the last stage, or for the whole model; None on ranks without the last stage.
        """
        return forward(None)

    def from_first(self, make: Callable[[], T]) -> T:
        """Return on all ranks what ``make`` returns on the rank with the first stage; its error is raised on all."""
        return make()

    def from_last(self, make: Callable[[], T]) -> T:
        """The same for the rank with the last stage."""
        return make()

"""What writes media in generation: the decoders, and the foundation itself, if image codes are words (Emu3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from omnitrain.data.packing.sample import NATIVE_PREFIX, Grid
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.render.template_renderer import TemplateRenderer
from omnitrain.errors import UserError
from omnitrain.models.components.protocols import MediaWriter, Token
from omnitrain.models.omni.heads import GeneratedSequence
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.host_values import to_device

WORDS = f"{NATIVE_PREFIX}image"  # the mode of sequences in which the foundation writes an image
_DECODE = "decode_image_tokens"  # method of such a foundation
_AREA = 512 * 512  # pixels


class ImageWords:
    """Writes images of one size as words of the foundation's vocabulary, as a decoder does.

    The processor of the foundation says which tokens an image has around its codes, and the foundation's own map which
    words are codes, and which stand between rows of them. Only codes are drawn.
    """

    def __init__(self, host: Any, renderer: TemplateRenderer, size: str | None, device: torch.device) -> None:
        """``host``: the module that decodes codes; ``size``: ``WIDTHxHEIGHT``; None: a square; ``device``: of logits.

        Raises:
            UserError: the processor makes an image of another size.
        """
        self._host = host
        self._processor = renderer.processor
        side = math.isqrt(getattr(self._processor, "image_area", _AREA))
        width, height = (side, side) if size is None else map(int, size.split("x"))
        ids, is_word, features = renderer.image_tokens(Image.new("RGB", (width, height)))
        made = (features["pixel_values"].shape[-2], features["pixel_values"].shape[-1])
        if size is not None and made != (height, width):
            kind = type(self._processor).__name__
            raise UserError(f"size {size!r}: {kind} makes {made[1]}x{made[0]} of such an image; use that")
        words = self._words(*made, int(is_word.sum()))
        self._rows, self._row = words.shape
        self._first = int(is_word.argmax())
        tokens, codes = torch.from_numpy(ids), torch.tensor(self._host.vocabulary_mapping.image_tokens)
        tokens[torch.from_numpy(is_word)] = words.flatten()
        codes_on_device, self.start = to_device(codes, device), int(tokens[0])
        self._next: list[range | Tensor] = [
            codes_on_device if is_code else range(token, token + 1)
            for token, is_code in zip(tokens.tolist()[1:], torch.isin(tokens, codes).tolist()[1:], strict=True)
        ]

    def _words(self, height: int, width: int, count: int) -> Tensor:
        """Words ``[rows, n]`` of an image whose codes are all 0, of pixels that have ``count`` words."""
        for stride in range(1, min(height, width) + 1):
            codes = torch.zeros(height // stride, width // stride, dtype=torch.long)
            words: Tensor = self._host.vocabulary_mapping.convert_img2bpe(codes).long()
            if words.numel() == count:
                return words
        raise UserError(f"no grid of codes has the {count} words that the processor gives {width}x{height} pixels")

    def grid(self, tokens: Sequence[Token]) -> Grid | None:
        """See :class:`DecoderMixin`: words have the positions of a text."""
        return None

    def is_complete(self, tokens: Sequence[Token]) -> bool:
        """Whether all tokens of an image, but its start token, are there."""
        return len(tokens) >= len(self._next)

    def next_classes(self, tokens: Sequence[Token], size: str | None) -> range | Tensor:
        """Return ids of the tokens that may follow: those of all codes ``[n]`` int64, or the only one."""
        return self._next[len(tokens)]

    def lm_generate(self, tokens: list[Any]) -> Image.Image:
        """Decode all tokens of an image but its start token."""
        words = torch.tensor(tokens[self._first - 1 :][: self._rows * self._row])
        words = torch.cat([words, words.new_zeros(3)])  # the method drops three tokens, which follow an image
        device = next(self._host.parameters()).device
        pixels = getattr(self._host, _DECODE)(words[None].to(device), self._rows, self._row - 1)
        images: Any = self._processor.postprocess(list(pixels.float().cpu()), return_tensors="PIL.Image.Image")
        image: Image.Image = images["pixel_values"][0]
        return image


def writers_of(model: OmniModel, processor: OmniProcessor, size: str | None) -> dict[str, MediaWriter]:
    """Return the decoders by name, and :class:`ImageWords`, if the foundation has it, for images of ``size``."""
    hosts = [module for module in model.foundation.modules() if hasattr(module, _DECODE)]
    renderer = processor.renderer
    if hosts and isinstance(renderer, TemplateRenderer) and "image" in renderer.native.written:
        return {**model.decoders, WORDS: ImageWords(hosts[-1], renderer, size, model.device)}
    if size is not None:
        raise UserError(f"size {size!r}: the model writes no images as words of its text; leave it out")
    return model.decoders


def start_tokens(processor: OmniProcessor, writers: Mapping[str, MediaWriter]) -> dict[int, str]:
    """Return the token after which each of ``writers`` writes -> its name."""
    found = {processor.start_of(m, name): name for m, names in processor.writers.items() for name in names}
    words = writers.get(WORDS)
    return found | {words.start: WORDS} if isinstance(words, ImageWords) else found


def places_in_grids(
    grid_positions: Callable[[Grid], np.ndarray | None],
    writers: Mapping[str, MediaWriter],
    turn: Sequence[tuple[str, list[int]]],
    sequences: Sequence[GeneratedSequence],
    width: int,
) -> dict[int, Tensor]:
    """Return where the next ``width`` tokens of sequences stand that write media in grids, and the token after them.

    Sequence -> position ids ``[axes, width + 1]`` int64, from those that the next token of a text would have. After the
    last token of an item they are those at which training continues.
    """
    found = {}
    for mode, rows in turn:
        for row in rows if mode != "text" else ():
            item = sequences[row].item
            grid = writers[mode].grid(item)
            if grid is None or (first := len(item) - grid.before) < 0:
                continue
            if (positions := grid_positions(grid)) is not None:
                stands = positions[:, first : first + 1] if first else 0
                found[row] = torch.from_numpy(positions[:, first : first + width + 1] - stands)
    return found


def parts_of(
    writers: Mapping[str, MediaWriter], processor: OmniProcessor, tokens: list[tuple[str, Token]]
) -> list[Any]:
    """Turn drawn tokens into text and media, in order, without start and end tokens."""
    hidden_ids = {processor.end_token, *processor.start_tokens.values(), *start_tokens(processor, writers)}
    parts: list[Any] = []
    text: list[Token] = []
    item: list[Token] = []
    for mode, token in tokens:
        if mode == "text":
            text += [] if token in hidden_ids else [token]
            continue
        item.append(token)
        if writers[mode].is_complete(item):
            parts += [processor.tokenizer.decode(text)] if text else []
            parts.append(writers[mode].lm_generate(item))
            text, item = [], []
    return parts + ([processor.tokenizer.decode(text)] if text else [])

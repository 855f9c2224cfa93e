"""Encode conversations with a HF processor (or tokenizer) and its chat template.

The template renders a conversation. The processor turns one medium at a time into text and features. The text with all
media in place is tokenized at once. The first samples of each kind are compared with the processor's output for the
whole conversation.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from omnitrain.data.chat.chat_template import ChatTemplate
from omnitrain.data.chat.parts import MediaPart, Message, content_parts, media_parts, tools_of
from omnitrain.data.chat.template_marks import Span
from omnitrain.data.chat.text_tokenizer import load_hf_processor, require_known_arguments
from omnitrain.data.packing.sample import Features, Grid, MediaSpan, Sample
from omnitrain.data.render.component_media import AttachedMedia
from omnitrain.data.render.expansion import MediaExpander, Medium, has_one_call, shown_by
from omnitrain.data.render.hf_visuals import FrameChoice
from omnitrain.data.render.media_texts import (
    AddedText,
    AttachedInsert,
    ForwardEncoder,
    ForwardInsert,
    Insert,
    NativeInsert,
    PlacedTokens,
)
from omnitrain.data.render.native import NativeInputs, unpassed
from omnitrain.data.render.renderer import Renderer
from omnitrain.data.sources.media import MediaFile
from omnitrain.data.sources.reading import Reading
from omnitrain.data.sources.rows import Row
from omnitrain.errors import UserError
from omnitrain.recipe import ChatFormat, Data
from omnitrain.recipe.data import VISUAL_KEYS

_ATTACHED = "\U000f0003"  # placeholder in the template's text for a medium of an attached component
_TYPE_IDS = {"image": 1, "video": 2, "audio": 3}  # values of mm_token_type_ids in transformers


class TemplateRenderer(Renderer):
    """Renders conversations with the chat template of a HF processor or tokenizer (``template``)."""

    def __init__(
        self,
        processor: ProcessorMixin | PreTrainedTokenizerBase,  # of the foundation; a tokenizer if it reads only text
        native: NativeInputs | None = None,  # media of the foundation; None: it has none
        *,
        starts: ChatFormat | None = None,  # with the start tokens of attached media; None: the defaults
        arguments: Mapping[str, Any] | None = None,  # of every call of `processor` (`images_kwargs`, ...)
        audio_in_video: bool = False,  # read videos together with their sound
        fps: float | None = None,  # frames of a second; None: the processor's own rate, as for the limits
        max_frames: int | None = None,
        min_pixels: int | None = None,  # of an image or frame
        max_pixels: int | None = None,
    ) -> None:
        """Check that processor, template and foundation fit together; UserError: they do not."""
        self._processor = processor
        self.tokenizer: PreTrainedTokenizerBase = getattr(processor, "tokenizer", processor)
        if not getattr(self.tokenizer, "is_fast", False):
            raise UserError(
                f"{type(self.tokenizer).__name__} does not give the characters of each token; use a fast tokenizer"
            )
        has_template = getattr(processor, "chat_template", None)
        self.template = ChatTemplate(processor if has_template else self.tokenizer, self.tokenizer)
        self.native = _without_unshown(processor, native or NativeInputs())
        self.reads = self.template.keys
        self.chat = starts or ChatFormat()
        self._settings: dict[str, Any] = {"arguments": dict(arguments or {}), "audio_in_video": audio_in_video}
        self._settings |= dict(zip(VISUAL_KEYS, (fps, max_frames, min_pixels, max_pixels), strict=True))
        self._expander = None
        if self.native.modalities:
            self._expander = MediaExpander(
                processor,
                self.native.modalities,
                arguments=self._settings["arguments"],
                audio_in_video=audio_in_video,
                reading=Reading(fps, None, max_frames, min_pixels, max_pixels),
            )
            self._forward = ForwardEncoder(self._expander, self.tokenizer, self.native)
        end, eos = self.template.end, self.tokenizer.eos_token_id
        if end is None and eos is None:
            raise UserError(
                f"neither the chat template nor {type(self.tokenizer).__name__} has a token that ends an answer"
            )
        self.end_token = int(eos if end is None else self.tokenizer.convert_tokens_to_ids(end))
        self._verified: set[tuple[tuple[str, int], ...]] = set()

    def with_native(self, native: NativeInputs) -> TemplateRenderer:
        """Return a copy for a foundation that reads and writes ``native``."""
        return TemplateRenderer(self._processor, native, starts=self.chat, **self._settings)

    def encode(self, row: Row, messages: list[Message], media: AttachedMedia, *, for_generation: bool) -> Sample:
        """See :meth:`Renderer.encode`."""
        parts = media_parts(messages)
        shown = _with_stand_ins(messages, parts, media)
        tools = tools_of(row.tools)
        text = self.template.render(shown, tools, add_generation_prompt=for_generation)
        answers = [] if for_generation else self.template.assistant_spans(text, shown, tools)
        places = self._places(text, parts, media)
        inserts = [self._insert(row, part, media, at) for part, at in places]
        if any(isinstance(insert, ForwardInsert) for insert in inserts):
            self._require_one_way(inserts)
            return self._forward.encode(row, text, answers, inserts, adds_special=self._adds_special(text))
        before, after = self._expander.around if self._expander else ("", "")
        added = AddedText((0, 0), before), *inserts, AddedText((len(text), len(text)), after)
        tokens = PlacedTokens.of(self.tokenizer, text, added, adds_special=self._adds_special(text))
        trained = tokens.covered(answers)
        spans: list[MediaSpan] = []
        for insert in inserts:
            is_written = isinstance(insert, NativeInsert) and insert.is_target
            for span in insert.spans(tokens, self.native):
                trained[span.positions] &= is_written
                spans.append(span)
        self._check_placeholders(tokens, spans)
        token_inputs = self._token_inputs(tokens, trained, inserts)
        self._verify(row, text, tokens, token_inputs, inserts)
        return Sample(
            id=row.id,
            source=row.source,
            input_ids=tokens.ids,
            loss_mask=trained,
            position_ids=self._in_grids(self._position_ids(tokens, token_inputs, inserts), spans),
            spans=tuple(sorted(spans, key=lambda span: span.start)),
            token_inputs=token_inputs,
        )

    def frame_choice(self, file: MediaFile) -> FrameChoice:
        """See :meth:`Renderer.frame_choice`."""
        return self._native_expander.frame_choice(file)

    def encode_text(self, row: Row, ids: list[int]) -> Sample:
        """See :meth:`Renderer.encode_text`."""
        array, trained = np.array(ids, dtype=np.int64), np.ones(len(ids), dtype=bool)
        tokens = PlacedTokens(array, np.zeros_like(array), np.zeros_like(array), ())
        token_inputs = self._token_inputs(tokens, trained, ())
        positions = self._position_ids(tokens, token_inputs, ())
        return Sample(row.id, row.source, array, trained, positions, token_inputs=token_inputs)

    def _adds_special(self, text: str) -> bool:
        """Follow ``apply_chat_template``: a tokenizer adds none, a processor adds them unless the text has them."""
        if self._processor is self.tokenizer:
            return False
        bos = self.tokenizer.bos_token
        return not (bos is not None and text.startswith(bos))

    def _places(self, text: str, parts: Sequence[MediaPart], media: AttachedMedia) -> list[tuple[MediaPart, Span]]:
        """Return each part with the characters that the template writes for it, in the order of the text."""
        waiting: dict[str, deque[MediaPart]] = {}
        for part in parts:
            token = _ATTACHED if media.handles(part) else self._native_expander.tokens[part.modality]
            waiting.setdefault(token, deque()).append(part)
        tokens = {_ATTACHED, *(self._expander.tokens.values() if self._expander else ())}
        found = list(re.finditer("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))), text))
        for token, count in Counter(match.group() for match in found).items():
            if count != len(waiting.get(token, ())):
                raise ValueError(_miscounted(token, count, len(waiting.get(token, ()))))
        for token in waiting.keys() - {match.group() for match in found}:
            raise ValueError(_miscounted(token, 0, len(waiting[token])))
        return [(waiting[match.group()].popleft(), match.span()) for match in found]

    @property
    def _native_expander(self) -> MediaExpander:
        assert self._expander is not None
        return self._expander

    def _insert(self, row: Row, part: MediaPart, media: AttachedMedia, at: Span) -> Insert:
        if media.handles(part):
            items = media.prepare(row, part)
            texts = [self.chat.start_of(part.modality, name) * (1 + item.num_tokens) for name, item in items]
            return AttachedInsert(at, "".join(texts), items, part.is_target)
        with row.open_media(part.modality, part.position) as file:
            medium = self._native_expander.decode(part.modality, file)
            if part.modality in self.native.in_forward:
                return ForwardInsert(at, "", medium)
            expansion = self._native_expander.expand(medium)
        for modality, features in expansion.features.items():
            self._require_passed(modality, features)
        return NativeInsert(at, expansion.text, row.id, medium, expansion, part.is_target)

    def _require_passed(self, modality: str, features: Features) -> None:
        """Raise if the processor returns arguments that the foundation takes and would not get."""
        passed = self.native.media_arguments.get(modality)
        if passed is not None and (lost := unpassed(features, passed, self.native.forward_arguments)):
            raise UserError(
                f"{self._native_expander.name} returns {', '.join(lost)} for {modality}; of its outputs omnitrain "
                f"passes only {', '.join(passed)} to this foundation, so it cannot be trained with {modality}"
            )

    def _require_one_way(self, inserts: Sequence[Insert]) -> None:
        if apart := sorted({insert.medium.modality for insert in inserts if isinstance(insert, NativeInsert)}):
            raise UserError(
                f"the conversation shows both {', '.join(apart)} and {', '.join(sorted(self.native.in_forward))}; the "
                "foundation reads the latter only in its own forward and the former in separate encoder calls, so a "
                "row must not have both"
            )

    def _check_placeholders(self, tokens: PlacedTokens, spans: list[MediaSpan]) -> None:
        """Raise if the row's text contains placeholder tokens, which no features would fill."""
        stray = np.isin(tokens.ids, list(set(self.native.placeholders.values())))
        for span in spans:
            stray[span.positions] = False
        if stray.any():
            raise ValueError(f"the text itself contains {int(stray.sum())} placeholder tokens of media")

    def _token_inputs(
        self, tokens: PlacedTokens, trained: np.ndarray, inserts: Sequence[Insert]
    ) -> dict[str, np.ndarray]:
        if self.native.token_types is not None:
            values = self.native.token_types(tokens.ids, trained)
            return {name: values[name] for name in self.native.token_inputs}
        return {name: self._token_input(name, tokens, inserts) for name in self.native.token_inputs}

    def _token_input(self, name: str, tokens: PlacedTokens, inserts: Sequence[Insert]) -> np.ndarray:
        native = [insert for insert in inserts if isinstance(insert, NativeInsert)]
        if any(name in insert.expansion.token_inputs for insert in native):
            return np.asarray(self._processor.create_mm_token_type_ids([tokens.ids.tolist()])[0], dtype=np.int64)
        values = np.zeros(len(tokens.ids), dtype=np.int64)
        for insert in native:
            for modality in insert.expansion.features:
                values[insert.rows(tokens, self.native, modality)] = _TYPE_IDS[modality]
        return values

    def _position_ids(
        self, tokens: PlacedTokens, token_inputs: dict[str, np.ndarray], inserts: Sequence[Insert]
    ) -> np.ndarray:
        if self.native.positions is None:
            return np.arange(len(tokens.ids), dtype=np.int64)
        features: dict[str, list[Features]] = {}
        has_sound = False
        for insert in inserts:
            if isinstance(insert, NativeInsert):
                has_sound |= len(insert.expansion.features) > 1
                for modality, values in insert.expansion.features.items():
                    features.setdefault(modality, []).append(values)
        return self.native.positions(tokens.ids, token_inputs, features, audio_in_video=has_sound)

    @property
    def processor(self) -> Any:
        """The HF processor that prepares media which the foundation reads; of a text model, the tokenizer."""
        return self._processor

    def image_tokens(self, image: Image.Image) -> tuple[np.ndarray, np.ndarray, Features]:
        """Return ids ``[n]`` int64 of an image that the foundation reads, ``[n]`` bool, and the features.

        The second is whether a token is a placeholder of the image.
        """
        expansion = self._native_expander.expand(Medium("image", image))
        ids = np.array(self.tokenizer(expansion.text, add_special_tokens=False)["input_ids"], dtype=np.int64)
        return ids, ids == self.native.placeholders["image"], expansion.features["image"]

    def grid_positions(self, grid: Grid) -> np.ndarray | None:
        """See :meth:`Renderer.grid_positions`."""
        return None if self.native.grid_positions is None else self.native.grid_positions(grid)

    def _in_grids(self, position_ids: np.ndarray, spans: Sequence[MediaSpan]) -> np.ndarray:
        """Move the tokens of written media, which count as text, to their places in grids, and what follows them."""
        position_ids = position_ids.copy()
        for span in sorted(spans, key=lambda span: span.start):
            grid = span.item.grid
            places = None if grid is None else self.grid_positions(grid)
            if grid is not None and places is not None:
                first, stop = span.start + grid.before, span.start + span.item.num_tokens
                position_ids[:, stop:] += places[:, -1:] - (stop - first)
                position_ids[:, first:stop] = position_ids[:, first : first + 1] + places[:, :-1]
        return position_ids

    def _verify(
        self, row: Row, text: str, tokens: PlacedTokens, token_inputs: dict[str, np.ndarray], inserts: Sequence[Insert]
    ) -> None:
        """Compare with the processor's output for the whole conversation, once for each mixture of media."""
        media = [insert.medium for insert in inserts if isinstance(insert, NativeInsert)]
        counts = Counter(medium.modality for medium in media)
        mixture = tuple(sorted((modality, min(count, 2)) for modality, count in counts.items()))
        if not media or len(media) < len(inserts) or mixture in self._verified or not has_one_call(media):
            return
        whole, *_ = self._native_expander.run(text, media)
        for name, ours in {"input_ids": tokens.ids, **token_inputs}.items():
            theirs = np.asarray(whole[name])[0] if name in whole else ours
            if not np.array_equal(ours, theirs):
                raise UserError(
                    f"row {row.id!r}: {type(self._processor).__name__} gives different {name} for single media than "
                    f"for the whole conversation ({_first_difference(ours, theirs)}), so its media cannot be prepared "
                    "one by one"
                )
        self._verified.add(mixture)

    def save_pretrained(self, folder: Path) -> dict[str, Any]:
        """See :meth:`Renderer.save_pretrained`."""
        self._processor.save_pretrained(str(folder))
        return {"template": {**self._settings, "starts": self.chat.model_dump()}}

    @classmethod
    def from_recipe(cls, data: Data, foundation: str, native: NativeInputs | None) -> TemplateRenderer:
        """Build a recipe's renderer, of ``foundation`` unless ``data`` names a processor."""
        processor = load_hf_processor(data.processor or foundation)
        arguments = {kind: values for kind, values in data.processor_arguments.model_dump().items() if values}
        require_known_arguments(processor, arguments)
        return cls(
            processor,
            native,
            starts=data.chat,
            arguments=arguments,
            audio_in_video=data.audio_in_video,
            **{key: getattr(data, key) for key in VISUAL_KEYS},
        )

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, settings: dict[str, Any], native: NativeInputs | None
    ) -> TemplateRenderer:
        """Load a renderer that :meth:`save_pretrained` saved, with the ``settings`` that it returned."""
        options = {name: value for name, value in settings.items() if name != "starts"}
        return cls(load_hf_processor(folder), native, starts=ChatFormat(**settings["starts"]), **options)


def _without_unshown(processor: ProcessorMixin | PreTrainedTokenizerBase, native: NativeInputs) -> NativeInputs:
    """Refuse ``in_forward`` modalities for which the processor has no token."""
    is_processor = isinstance(processor, ProcessorMixin)
    unshown = native.in_forward - (shown_by(processor, native.in_forward).keys() if is_processor else set())
    return native.without_forward(dict.fromkeys(unshown, f"{type(processor).__name__} has no token for it"))


def _with_stand_ins(messages: list[Message], parts: Sequence[MediaPart], media: AttachedMedia) -> list[Message]:
    """Replace each medium of an attached component by a text part of one reserved character."""
    remaining = iter(parts)
    shown = []
    for message in messages:
        if not isinstance(message.get("content"), list):
            shown.append(message)
            continue
        contents = []
        for part in content_parts(message):
            is_attached = part["type"] != "text" and media.handles(next(remaining))
            contents.append({"type": "text", "text": _ATTACHED} if is_attached else part)
        shown.append({**message, "content": contents})
    return shown


def _miscounted(token: str, found: int, expected: int) -> str:
    shown = "the placeholder of attached media" if token == _ATTACHED else repr(token)
    why = (
        "the messages' text contains it; if it stands for a medium, set `media_markers` of the data source"
        if found > expected
        else "the template does not write all media"
    )
    return f"the chat template's text has {shown} {found} times, but the messages show {expected} such media: {why}"


def _first_difference(ours: np.ndarray, theirs: np.ndarray) -> str:
    if len(ours) != len(theirs):
        return f"{len(ours)} and {len(theirs)} tokens"
    at = int(np.flatnonzero(ours != theirs)[0])
    return f"{ours[at]} and {theirs[at]} at token {at}"

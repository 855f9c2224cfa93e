"""A HF processor (or tokenizer) and its chat template, as they are.

The template renders a conversation; the processor turns one medium at a time into text and features; the text with
every medium in place is tokenised at once. That the ids are the processor's own for the whole conversation is checked
on the first samples of each kind.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from omnitrain.data.attached import AttachedMedia
from omnitrain.data.chat_template import ChatTemplate
from omnitrain.data.expansion import MediaExpander, shown_by
from omnitrain.data.hf_processor import load_hf_processor, require_known_arguments
from omnitrain.data.in_forward import ForwardEncoder, ForwardInsert
from omnitrain.data.inserts import AttachedInsert, Insert, NativeInsert, PlacedTokens
from omnitrain.data.native import NativeInputs
from omnitrain.data.parts import MediaPart, Message, content_parts, media_parts
from omnitrain.data.renderer import Encoded, single_token
from omnitrain.data.rows import Row
from omnitrain.data.sample import Features, MediaSpan
from omnitrain.data.template_marks import Span
from omnitrain.data.tool_calls import tools_of
from omnitrain.errors import UserError
from omnitrain.recipe import ChatFormat, Data

_ATTACHED = "\U000f0003"  # stands in the template's text for a medium of an attached component
_TYPE_IDS = {"image": 1, "video": 2, "audio": 3}  # as transformers numbers them in mm_token_type_ids


class TemplateRenderer:
    """Conversations by the chat template of a HF processor or tokenizer.

    Attributes:
        tokenizer: the text tokenizer.
        template: the chat template.
        end_token: id of the token that ends an assistant's message.
        native_modalities: what the foundation reads by itself.
        refused_modalities: what it has a way to read, which cannot be used -> why.
    """

    def __init__(
        self,
        processor: ProcessorMixin | PreTrainedTokenizerBase,
        native: NativeInputs | None = None,
        *,
        starts: ChatFormat | None = None,
        arguments: Mapping[str, Any] | None = None,
        audio_in_video: bool = False,
        max_frames: int = 128,
    ) -> None:
        """Look at processor, template and foundation together.

        Args:
            processor: of the foundation; a tokenizer where it reads text alone.
            native: what the foundation reads by itself; None: nothing.
            starts: holds the start tokens of media of attached components; None: the defaults.
            arguments: further arguments of every call of ``processor`` (``images_kwargs``, ``videos_kwargs``, ...).
            audio_in_video: read videos together with their sound.
            max_frames: frames decoded from a video at most.

        Raises:
            UserError: they do not fit together.
        """
        self._processor = processor
        self.tokenizer: PreTrainedTokenizerBase = getattr(processor, "tokenizer", processor)
        if not getattr(self.tokenizer, "is_fast", False):
            raise UserError(
                f"{type(self.tokenizer).__name__} does not tell which characters a token covers; name a fast tokenizer"
            )
        has_template = getattr(processor, "chat_template", None)
        self.template = ChatTemplate(processor if has_template else self.tokenizer, self.tokenizer)
        self.native = _as_shown(processor, native or NativeInputs({}))
        self.native_modalities = frozenset(self.native.placeholders) | self.native.in_forward
        self.refused_modalities = self.native.refused
        self._starts = starts or ChatFormat()
        self._settings: dict[str, Any] = {
            "arguments": dict(arguments or {}),
            "audio_in_video": audio_in_video,
            "max_frames": max_frames,
        }
        self._expander = None
        if self.native_modalities:
            self._expander = MediaExpander(processor, self.native_modalities, **self._settings)
            self._forward = ForwardEncoder(self._expander, self.tokenizer, self.native)
        self.end_token = self._end_token()
        self._verified: set[tuple[tuple[str, int], ...]] = set()

    def _end_token(self) -> int:
        if self.template.end is not None:
            return int(self.tokenizer.convert_tokens_to_ids(self.template.end))
        if self.tokenizer.eos_token_id is None:
            raise UserError(
                f"neither the chat template nor {type(self.tokenizer).__name__} names a token that ends an answer"
            )
        return int(self.tokenizer.eos_token_id)

    def start_token(self, modality: str) -> int:
        """See :meth:`Renderer.start_token`."""
        return single_token(self.tokenizer, modality, getattr(self._starts, modality))

    def encode(self, row: Row, messages: list[Message], media: AttachedMedia, *, for_generation: bool) -> Encoded:
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
            return self._forward.encode(text, answers, inserts, adds_special=self._adds_special(text))
        tokens = PlacedTokens.of(self.tokenizer, text, inserts, adds_special=self._adds_special(text))
        trained = tokens.covered(answers)
        spans: list[MediaSpan] = []
        for insert in inserts:
            for span in insert.spans(tokens, self.native):
                trained[span.positions] = False
                spans.append(span)
        self._check_placeholders(tokens, spans)
        token_inputs = self._token_inputs(tokens, trained, inserts)
        self._verify(row, text, tokens, token_inputs, inserts)
        return Encoded(
            input_ids=tokens.ids,
            loss_mask=trained,
            position_ids=self._position_ids(tokens, token_inputs, inserts),
            spans=tuple(sorted(spans, key=lambda span: span.start)),
            token_inputs=token_inputs,
        )

    def _adds_special(self, text: str) -> bool:
        """As ``apply_chat_template(tokenize=True)`` does: a tokenizer never, a processor unless the text has it."""
        if self._processor is self.tokenizer:
            return False
        bos = self.tokenizer.bos_token
        return not (bos is not None and text.startswith(bos))

    def _places(self, text: str, parts: Sequence[MediaPart], media: AttachedMedia) -> list[tuple[MediaPart, Span]]:
        """Each part with the characters by which the template shows it, in the order of the text."""
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
            name, item = media.prepare(row, part)
            return AttachedInsert(
                at, getattr(self._starts, part.modality) * (1 + item.num_tokens), name, item, part.is_target
            )
        medium = self._native_expander.decode(row, part)
        if part.modality in self.native.in_forward:
            return ForwardInsert(at, "", medium)
        expansion = self._native_expander.expand(medium)
        return NativeInsert(at, expansion.text, row.id, medium, expansion)

    def _require_one_way(self, inserts: Sequence[Insert]) -> None:
        if apart := sorted({insert.medium.modality for insert in inserts if isinstance(insert, NativeInsert)}):
            raise UserError(
                f"the conversation shows {', '.join(apart)} with {', '.join(sorted(self.native.in_forward))}; the "
                "foundation's own forward reads the latter and its towers, apart, the former: have one of them in a row"
            )

    def _check_placeholders(self, tokens: PlacedTokens, spans: list[MediaSpan]) -> None:
        """Placeholder tokens outside every span come from the row's own text, and no row would fill them."""
        stray = np.isin(tokens.ids, list(set(self.native.placeholders.values())))
        for span in spans:
            stray[span.positions] = False
        if stray.any():
            raise ValueError(f"the text itself holds {int(stray.sum())} placeholder tokens of media")

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

    def _verify(
        self,
        row: Row,
        text: str,
        tokens: PlacedTokens,
        token_inputs: dict[str, np.ndarray],
        inserts: Sequence[Insert],
    ) -> None:
        """Compare with the processor's run on the whole conversation: once for each mixture of media."""
        media = [insert.medium for insert in inserts if isinstance(insert, NativeInsert)]
        counts = Counter(medium.modality for medium in media)
        mixture = tuple(sorted((modality, min(count, 2)) for modality, count in counts.items()))
        if not media or len(media) < len(inserts) or mixture in self._verified:
            return
        whole, _ = self._native_expander.run(text, media)
        for name, ours in {"input_ids": tokens.ids, **token_inputs}.items():
            theirs = np.asarray(whole[name])[0] if name in whole else ours
            if not np.array_equal(ours, theirs):
                raise UserError(
                    f"row {row.id!r}: {type(self._processor).__name__} gives other {name} for media alone than "
                    f"together ({_first_difference(ours, theirs)}), so that its media cannot be prepared one by one"
                )
        self._verified.add(mixture)

    def save_pretrained(self, folder: Path) -> dict[str, Any]:
        """See :meth:`Renderer.save_pretrained`."""
        self._processor.save_pretrained(str(folder))
        return {"template": {**self._settings, "starts": self._starts.model_dump()}}

    @classmethod
    def from_recipe(cls, data: Data, foundation: str, native: NativeInputs | None) -> TemplateRenderer:
        """As a recipe says.

        Args:
            data: the recipe's ``data`` node.
            foundation: folder or Hub id of the foundation, whose processor is taken where ``data`` names none.
            native: what the foundation reads by itself; None: nothing.

        Raises:
            UserError: no processor there, or one that does not fit.
        """
        processor = load_hf_processor(data.processor or foundation)
        arguments = {part: given for part, given in data.processor_arguments.model_dump().items() if given}
        require_known_arguments(processor, arguments)
        return cls(
            processor,
            native,
            starts=data.chat,
            arguments=arguments,
            audio_in_video=data.audio_in_video,
            max_frames=data.max_frames,
        )

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, settings: dict[str, Any], native: NativeInputs | None
    ) -> TemplateRenderer:
        """Read what :meth:`save_pretrained` wrote; ``settings`` are what it returned."""
        options = {name: value for name, value in settings.items() if name != "starts"}
        return cls(load_hf_processor(folder), native, starts=ChatFormat(**settings["starts"]), **options)


def _as_shown(processor: ProcessorMixin | PreTrainedTokenizerBase, native: NativeInputs) -> NativeInputs:
    """Without what only the foundation's forward reads and its processor does not show."""
    is_processor = isinstance(processor, ProcessorMixin)
    unshown = native.in_forward - (shown_by(processor, native.in_forward).keys() if is_processor else set())
    return native.without_forward(dict.fromkeys(unshown, f"{type(processor).__name__} names no token for it"))


def _with_stand_ins(messages: list[Message], parts: Sequence[MediaPart], media: AttachedMedia) -> list[Message]:
    """The messages, with a text part of one reserved character for each medium of an attached component."""
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
    shown = "a stand-in for media" if token == _ATTACHED else repr(token)
    why = (
        "their text spells it out; where that stands for a medium, set `media_markers` of the data source"
        if found > expected
        else "the template leaves media out"
    )
    return f"the chat template's text shows {shown} {found} times, the messages show {expected} such media: {why}"


def _first_difference(ours: np.ndarray, theirs: np.ndarray) -> str:
    if len(ours) != len(theirs):
        return f"{len(ours)} and {len(theirs)} tokens"
    at = int(np.flatnonzero(ours != theirs)[0])
    return f"{ours[at]} and {theirs[at]} at token {at}"

"""Turn data rows into samples: chat rendering, tokenizing, media preparation. Runs in the data workers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from omnitrain.data.chat.parts import MediaPart, Message, content_parts, is_trained, media_parts
from omnitrain.data.chat.text_tokenizer import TextEncoder, load_tokenizer
from omnitrain.data.packing.budget import PackBudget
from omnitrain.data.packing.sample import NATIVE_PREFIX, Rejected, Sample
from omnitrain.data.render.component_media import AttachedMedia, ComponentAdapter
from omnitrain.data.render.native import NativeInputs
from omnitrain.data.render.renderer import ChatRenderer, Renderer
from omnitrain.data.render.template_renderer import TemplateRenderer
from omnitrain.data.sources.clips import Choose
from omnitrain.data.sources.documents import Document
from omnitrain.data.sources.media import MediaFile
from omnitrain.data.sources.part_files import is_file
from omnitrain.data.sources.rows import MODALITIES, Row
from omnitrain.data.sources.turns import canonical, how_to_show
from omnitrain.errors import UserError
from omnitrain.recipe import ChatFormat
from omnitrain.recipe.data import ConditionDropout, Overlong

_SETTINGS_FILE = "omni_processor.json"


class OmniProcessor:
    """Turns data rows into samples, with a chat format and the media adapters of all components.

    Attributes:
        renderer: the chat format.
        tokenizer: the text tokenizer.
        end_token: id of the token that ends an answer.
        start_tokens: modality of an attached component, or decoder with its own -> id of the token before each item.
        readers: modality -> name -> adapter of each attached encoder. All of them read each medium of the modality,
            one after the other, unless the data set names some.
        writers: modality -> name -> adapter of each decoder. The data set names one of several.
    """

    def __init__(
        self, renderer: Renderer, readers: Mapping[str, ComponentAdapter], writers: Mapping[str, ComponentAdapter]
    ) -> None:
        """Take adapters by component name; UserError: two decoders have one start token, or it is not one token."""
        self.renderer, self.tokenizer, self.end_token = renderer, renderer.tokenizer, renderer.end_token
        self._media = AttachedMedia(readers, writers)
        self.readers, self.writers = self._media.readers, self._media.writers
        for modality in sorted(renderer.native.modalities & set(self.readers)):
            raise UserError(
                f"model.encoders: {', '.join(self.readers[modality])} handles {modality}, and so does the foundation; "
                "remove the encoder"
            )
        own = [name for name in writers if name in renderer.chat.starts]
        self.start_tokens = {key: renderer.start_token(key) for key in (*self._media.modalities, *own)}
        for modality, decoders in self.writers.items():
            if len({self.start_of(modality, name) for name in decoders}) < len(decoders):
                raise UserError(
                    f"model.decoders: {' and '.join(decoders)} write {modality} after the same start token; set "
                    f"`data.chat.starts: {{{max(decoders)}: ...}}` to another one"
                )

    def rendering(self, renderer: Renderer) -> OmniProcessor:
        """Return a copy with another chat format, for the same components."""
        other = copy(self)
        other.renderer = renderer
        return other

    def sample(
        self,
        row: Row,
        index: int = 0,
        max_tokens: int | None = None,
        *,
        without_tail: bool = False,
        may_ask: bool = False,
        dropped: Collection[str] = (),
    ) -> Sample | Rejected:
        """Return the training sample of a row, or :class:`Rejected` for one that is damaged, overlong or not trained.

        ``index``: position in the global data order. ``max_tokens``: of a sample; None: no limit. ``without_tail``: see
        :meth:`Sample.without_tail`. ``may_ask``: it may have nothing to predict, such as a held-out question.
        ``dropped``: what the condition of a row loses whose answer has media: ``text``, ``image``, ... Raises
        UserError: the model cannot use such rows at all (no component handles a modality).
        """
        if row.document is not None and not row.problem:
            return self._document(row, row.document, index, max_tokens, without_tail=without_tail)
        sample = self._try(row, row.messages, index, for_generation=False, dropped=dropped)
        if isinstance(sample, Sample) and (useless := _not_shown(row) or (not may_ask and _not_trained(row, sample))):
            return Rejected(row.id, row.source, useless, index)
        if without_tail and isinstance(sample, Sample):
            sample = sample.without_tail()
        if isinstance(sample, Sample) and max_tokens is not None and len(sample) > max_tokens:
            reason = f"{len(sample)} tokens, but a pack holds at most {max_tokens}"
            return Rejected(row.id, row.source, reason, index, is_overlong=True)
        return sample

    def start_of(self, modality: str, decoder: str) -> int:
        """Return the id of the token after which a decoder writes."""
        return self.start_tokens.get(decoder, self.start_tokens[modality])

    def components_of(self, row: Row, part: MediaPart) -> list[str]:
        """Return the names of the components that a part of a row goes to."""
        if not self._media.handles(part):
            return [f"{NATIVE_PREFIX}{part.modality}"]
        return list(self._media.adapters_of(row, part))

    def frames_of(self, part: MediaPart, file: MediaFile) -> Choose:
        """Return the function that chooses the frames of the video of a part; of other media it has no meaning."""
        if self._media.handles(part):
            return self._media.frame_choice(part, file).choose()
        return self.renderer.frame_choice(file).choose()

    def prompt(self, row: Row, index: int = 0, *, is_guided: bool = False) -> Sample | Rejected:
        """Return what generation starts from; ``is_guided``: with :attr:`Sample.unconditional`."""
        if row.document is not None:
            return Rejected(row.id, row.source, "a document asks nothing", index)
        prompt = self._try(row, row.question, index, for_generation=True)
        if not is_guided or isinstance(prompt, Rejected):
            return prompt
        other = self._try(row, row.question, index, for_generation=True, dropped=CONDITION)
        return other if isinstance(other, Rejected) else replace(prompt, unconditional=other)

    @cached_property
    def _encode_text(self) -> TextEncoder:
        return TextEncoder(self.tokenizer, ())

    def _document(
        self, row: Row, document: Document, index: int, max_tokens: int | None, *, without_tail: bool
    ) -> Sample | Rejected:
        """Return the first piece of a document, which has the others. All but the last two are as long as possible."""
        first, last = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        starts = document.begins and first is not None and first in self.tokenizer("")["input_ids"]
        ends = [self.end_token if last is None else last] if document.ends else []
        try:
            ids = [*([first] if starts else []), *self._encode_text(document.text), *ends]
        except ValueError as error:
            return Rejected(row.id, row.source, str(error), index)
        if len(ids) < 2:
            return Rejected(row.id, row.source, "the document is empty", index)
        longest = len(ids) if max_tokens is None else max(2, max_tokens + without_tail)
        borders = [*range(0, len(ids), longest), len(ids)]
        if borders[-1] - borders[-2] == 1:  # a single token would have nothing to predict
            borders[-2] -= 1
        pieces = []
        for start, stop in pairwise(borders):
            sample = self.renderer.encode_text(row, ids[start:stop])
            pieces.append(sample.without_tail() if without_tail else sample)
        pieces = [replace(piece, index=index, piece=i, num_pieces=len(pieces)) for i, piece in enumerate(pieces)]
        return replace(pieces[0], more=tuple(pieces[1:]))

    def _try(
        self, row: Row, messages: list[Message], index: int, *, for_generation: bool, dropped: Collection[str] = ()
    ) -> Sample | Rejected:
        if row.problem:
            return Rejected(row.id, row.source, row.problem, index)
        try:
            messages = [canonical(message) for message in messages]
            parts = media_parts(messages)
        except (TypeError, KeyError, AttributeError, UnicodeEncodeError) as error:
            problem = f"no {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
            reason = (
                f"malformed messages ({problem}): expected a list of role and content, as text or as parts with type"
            )
            return Rejected(row.id, row.source, reason, index)
        except UserError as error:
            raise row.named(error) from error
        except ValueError as error:
            return Rejected(row.id, row.source, str(error), index)
        self._check_modalities(row, parts)
        if dropped and (for_generation or any(part.is_target for part in parts)):
            row, messages = without_condition(row, messages, dropped)
        try:
            sample = self.renderer.encode(row, messages, self._media, for_generation=for_generation)
        except UserError as error:
            raise row.named(error) from error
        except ValueError as error:
            return Rejected(row.id, row.source, str(error), index)
        if not len(sample):
            return Rejected(row.id, row.source, "no tokens: the row has no messages", index)
        return replace(sample, index=index, seed=None if for_generation else sample.seed)

    def _check_modalities(self, row: Row, parts: list[MediaPart]) -> None:
        foundation = self.renderer.native
        for part in parts:
            if self._media.handles(part):
                continue
            if part.modality in (foundation.written if part.is_target else foundation.modalities):
                if part.components is None:
                    continue
                raise UserError(
                    f"row {row.id!r} of {row.source!r}: a part of {part.modality} names {', '.join(part.components)}, "
                    "but no attached component is for it: the foundation is; remove the names"
                )
            verb, kind = ("write", "decoders") if part.is_target else ("read", "encoders")
            able = {*self.writers, *foundation.written} if part.is_target else {*self.readers, *foundation.modalities}
            refused = (foundation.unwritten if part.is_target else foundation.refused).get(part.modality)
            why = f" (the foundation cannot {verb} it: {refused})" if refused else ""
            raise UserError(
                f"row {row.id!r} of {row.source!r} asks the model to {verb} {part.modality}, but it can {verb} "
                f"{sorted(able) or 'no media'}{why}; add a component for {part.modality} to model.{kind}, or drop "
                "these rows"
            )

    def save_pretrained(self, folder: str | Path) -> None:
        """Save the tokenizer, chat format and HF processor to ``folder``. Components are saved with the model."""
        settings = self.renderer.save_pretrained(Path(folder))
        Path(folder, _SETTINGS_FILE).write_text(json.dumps(settings, indent=2) + "\n")

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        readers: Mapping[str, ComponentAdapter],
        writers: Mapping[str, ComponentAdapter],
        native: NativeInputs | None = None,
    ) -> OmniProcessor:
        """Load what :meth:`save_pretrained` saved; UserError: it is not in ``folder``."""
        settings_file = Path(folder, _SETTINGS_FILE)
        if not settings_file.is_file():
            raise UserError(f"{settings_file} is missing: {folder} is not a checkpoint that omnitrain saved")
        settings = json.loads(settings_file.read_text())
        renderer: Renderer
        if "template" in settings:
            renderer = TemplateRenderer.from_pretrained(folder, settings["template"], native)
        else:
            renderer = ChatRenderer(load_tokenizer(folder, "checkpoint"), ChatFormat(**settings["chat"]))
        return cls(renderer, readers, writers)


def _not_shown(row: Row) -> str:
    """Describe media of the row that its messages do not show, so that the model would silently ignore them."""
    shown = Counter(part.modality for part in media_parts(row.messages))
    surplus = {
        modality: len(values) for modality, values in row.media.items() if any(map(is_file, values[shown[modality] :]))
    }
    return "; ".join(
        f"the row has {count} {modality} files, but the messages show {shown[modality]}: {how_to_show(modality)}"
        for modality, count in surplus.items()
    )


def _not_trained(row: Row, sample: Sample) -> str:
    """Describe why nothing is learnt from a row; empty: something is."""
    if not sample.is_trained:
        return "nothing of the row is trained: no message of the assistant, or none without `weight: 0`"
    answers = [message for message in map(canonical, row.messages) if is_trained(message)]
    has_more = any(message.get("tool_calls") or message.get("reasoning_content") for message in answers)
    parts = [part for message in answers for part in content_parts(message)]
    is_said = has_more or any(part["type"] != "text" or part["text"].strip() for part in parts)
    return "" if is_said else "all answers of the row are empty"


def parts_of_items(components: Sequence[str], row: Row, processor: OmniProcessor) -> list[MediaPart | None]:
    """Return the part that each item shows, by the ``components`` of the items in order; None: unknown."""
    by_component: dict[str, list[MediaPart]] = {}
    for part in media_parts(row.messages):
        for name in processor.components_of(row, part):
            by_component.setdefault(name, []).append(part)
    parts = {
        name: iter(of_name if len(of_name) == components.count(name) else ()) for name, of_name in by_component.items()
    }
    return [next(parts.get(name, iter(())), None) for name in components]


def modality_of(component: str, part: MediaPart | None) -> str:
    """Return the modality of an item: from its part, else from its component's name."""
    return part.modality if part is not None else component.removeprefix(NATIVE_PREFIX)


_HEAD_ROLES = ("system", "developer")


def sample_within(
    processor: OmniProcessor,
    row: Row,
    budget: PackBudget | None,
    overlong: Overlong = "drop",
    *,
    without_tail: bool = False,
    may_ask: bool = False,
    dropped: Collection[str] = (),
) -> Sample | Rejected:
    """Return the sample of a row, the first of several, or why it is rejected; further arguments as of ``processor``.

    With ``split``, a conversation beyond the budget is cut between turns into the fewest trained samples, each with the
    system message. Raises UserError: the model cannot use such rows at all.
    """
    prepare = partial(_sample, processor, budget=budget, without_tail=without_tail, dropped=dropped)
    sample = prepare(row, may_ask=may_ask)
    if overlong == "split" and isinstance(sample, Rejected) and sample.is_overlong:
        return _split(row, partial(prepare, may_ask=True))  # another piece has what is trained
    return sample


def _sample(processor: OmniProcessor, row: Row, *, budget: PackBudget | None, **options: Any) -> Sample | Rejected:
    sample = processor.sample(row, max_tokens=None if budget is None else budget.tokens, **options)
    if isinstance(sample, Sample) and budget is not None and (reason := budget.excess(sample)):
        return Rejected(row.id, row.source, reason, is_overlong=True)
    return sample


def _split(row: Row, prepare: Callable[[Row], Sample | Rejected]) -> Sample | Rejected:
    """Return the first piece of a conversation, which has the others; or the reason why it cannot be split."""
    head, turns = _head_and_turns(row.messages)
    media = _media_by_message(row)

    def piece(start: int, stop: int) -> Sample | Rejected:
        indices = [*head, *(index for turn in turns[start:stop] for index in turn)]
        shown: dict[str, list[Any]] = {}
        for modality, value in (file for index in indices for file in media[index]):
            shown.setdefault(modality, []).append(value)
        return prepare(replace(row, messages=[row.messages[index] for index in indices], media=shown))

    pieces: list[Sample] = []
    start = 0
    while start < len(turns):
        found, fits, too_many = piece(start, start + 1), start + 1, len(turns) + 1
        if isinstance(found, Rejected):
            return replace(found, reason=f"turn {start + 1} of {len(turns)} alone: {found.reason}")
        while too_many - fits > 1:
            stop = (fits + too_many) // 2
            longer = piece(start, stop)
            if isinstance(longer, Sample):
                found, fits = longer, stop
            elif longer.is_overlong:
                too_many = stop
            else:
                return longer
        pieces += [found] * found.is_trained
        start = fits
    numbered = [replace(one, piece=number, num_pieces=len(pieces)) for number, one in enumerate(pieces)]
    return replace(numbered[0], more=tuple(numbered[1:]))


def _head_and_turns(messages: Sequence[Message]) -> tuple[list[int], list[list[int]]]:
    """Return the indices of the first system messages, and of each turn, which begins with user messages."""
    roles = [message["role"] for message in messages]
    num_head = next((index for index, role in enumerate(roles) if role not in _HEAD_ROLES), len(roles))
    turns: list[list[int]] = []
    for index in range(num_head, len(roles)):
        if not turns or (roles[index] == "user" and roles[index - 1] != "user"):
            turns.append([])
        turns[-1].append(index)
    return list(range(num_head)), turns


def _media_by_message(row: Row) -> list[list[tuple[str, Any]]]:
    """Return the modality and file of each medium that a message shows, in order."""
    files = {modality: iter(values) for modality, values in row.media.items()}
    parts = (media_parts([message]) for message in row.messages)
    return [[(part.modality, next(files[part.modality])) for part in of_message] for of_message in parts]


CONDITION = frozenset({"text", *MODALITIES})
_STREAM = 1  # of random numbers: other users of seed and index draw others


def without_condition(row: Row, messages: Sequence[Message], kinds: Collection[str]) -> tuple[Row, list[Message]]:
    """Return a row and its messages; all but the assistant's have lost parts of ``kinds``; ``text``: tools, too."""
    kept = [part for part in media_parts(list(messages)) if part.is_target or part.modality not in kinds]
    media = {
        modality: [file for part in kept if part.modality == modality for file in files[part.position :][:1]]
        for modality, files in row.media.items()
    }
    row = replace(row, media=media, tools=None if "text" in kinds else row.tools)
    return row, [one if one["role"] == "assistant" else _without(one, kinds) for one in messages]


def _without(message: Message, kinds: Collection[str]) -> Message:
    return message | {"content": [part for part in content_parts(message) if part["type"] not in kinds] or ""}


def dropped_kinds(dropout: ConditionDropout, seed: int, index: int) -> frozenset[str]:
    """Return what the sample of a position in the global data order loses: a function of its arguments alone."""
    if dropout == ConditionDropout():
        return frozenset()
    whole, *draws = np.random.default_rng((seed, index, _STREAM)).random(1 + len(CONDITION)).tolist()
    kinds = zip(sorted(CONDITION), draws, strict=True)
    lost = {kind for kind, draw in kinds if whole < dropout.whole or draw < getattr(dropout, kind)}
    return frozenset(lost)

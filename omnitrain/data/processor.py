"""Rows -> samples: chat rendering, tokenising, media preparation. Runs in the data workers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from omnitrain.data.attached import AttachedMedia, MediaAdapter
from omnitrain.data.chat_renderer import ChatRenderer
from omnitrain.data.native import NativeInputs
from omnitrain.data.parts import MediaPart, Message, media_parts
from omnitrain.data.renderer import Renderer
from omnitrain.data.rows import Row, is_file
from omnitrain.data.sample import Rejected, Sample
from omnitrain.data.template_renderer import TemplateRenderer
from omnitrain.data.text_tokenizer import load_tokenizer
from omnitrain.data.turns import how_to_show
from omnitrain.errors import UserError
from omnitrain.recipe import ChatFormat

_SETTINGS_FILE = "omni_processor.json"


class OmniProcessor:
    """A chat format and the media side of every component.

    Attributes:
        renderer: the chat format.
        tokenizer: the text tokenizer.
        end_token: id of the token that ends an answer.
        start_tokens: modality that an attached component reads or writes -> id of the token in front of it.
        readers: modality -> name and adapter of the attached encoder.
        writers: modality -> name and adapter of the decoder.
    """

    def __init__(
        self, renderer: Renderer, readers: Mapping[str, MediaAdapter], writers: Mapping[str, MediaAdapter]
    ) -> None:
        """Check that each modality has one reader and one writer at most, and one start token.

        Args:
            renderer: how a conversation becomes tokens.
            readers: encoder name -> adapter.
            writers: decoder name -> adapter.

        Raises:
            UserError: two components for one modality, or a start token that is not one token of the vocabulary.
        """
        self.renderer, self.tokenizer, self.end_token = renderer, renderer.tokenizer, renderer.end_token
        self._media = AttachedMedia(readers, writers)
        self.readers, self.writers = self._media.readers, self._media.writers
        for modality in sorted(renderer.native_modalities & set(self.readers)):
            raise UserError(
                f"model.encoders: {self.readers[modality][0]!r} handles {modality}, and so does the foundation by "
                "itself; keep one"
            )
        self.start_tokens = {m: renderer.start_token(m) for m in self._media.modalities}

    def sample(
        self, row: Row, index: int = 0, max_tokens: int | None = None, *, without_tail: bool = False
    ) -> Sample | Rejected:
        """The training sample of a row; a damaged or overlong row comes back as :class:`Rejected`.

        Args:
            row: what was said.
            index: position in the global data order.
            max_tokens: that the model may be given; None: any number.
            without_tail: see :meth:`Sample.without_tail`.

        Raises:
            UserError: the row asks for something the model cannot do at all (a modality without a component).
        """
        sample = self._try(row, row.messages, index, for_generation=False)
        if isinstance(sample, Sample) and (unseen := _not_shown(row)):
            return Rejected(row.id, row.source, unseen, index)
        if without_tail and isinstance(sample, Sample):
            sample = sample.without_tail()
        if isinstance(sample, Sample) and max_tokens is not None and len(sample) > max_tokens:
            reason = f"{len(sample)} tokens, at most {max_tokens} fit into a pack"
            return Rejected(row.id, row.source, reason, index, is_overlong=True)
        return sample

    def prompt(self, row: Row, index: int = 0) -> Sample | Rejected:
        """Everything before the last assistant message's content: what generation starts from."""
        return self._try(row, row.question, index, for_generation=True)

    def _try(self, row: Row, messages: list[Message], index: int, *, for_generation: bool) -> Sample | Rejected:
        try:
            parts = media_parts(messages)
        except (TypeError, KeyError, AttributeError, UnicodeEncodeError) as error:
            problem = f"{type(error).__name__}: {error}"
            reason = (
                f"malformed messages ({problem}): expected a list of role and content, as text or as parts with type"
            )
            return Rejected(row.id, row.source, reason, index)
        except UserError as error:
            raise _in_row(row, error) from error
        self._check_modalities(row, parts)
        try:
            encoded = self.renderer.encode(row, messages, self._media, for_generation=for_generation)
        except UserError as error:
            raise _in_row(row, error) from error
        except ValueError as error:
            return Rejected(row.id, row.source, str(error), index)
        if not len(encoded.input_ids):
            return Rejected(row.id, row.source, "no tokens: the row has no messages", index)
        return Sample(
            id=row.id,
            source=row.source,
            input_ids=encoded.input_ids,
            loss_mask=encoded.loss_mask,
            position_ids=encoded.position_ids,
            spans=encoded.spans,
            index=index,
            token_inputs=encoded.token_inputs,
            forward_inputs=encoded.forward_inputs,
        )

    def _check_modalities(self, row: Row, parts: list[MediaPart]) -> None:
        native = self.renderer.native_modalities
        for part in parts:
            if self._media.handles(part) or (part.modality in native and not part.is_target):
                continue
            verb, kind = ("write", "decoders") if part.is_target else ("read", "encoders")
            able = sorted(self.writers if part.is_target else {*self.readers, *native})
            refused = None if part.is_target else self.renderer.refused_modalities.get(part.modality)
            why = f" (not by the foundation, for {refused})" if refused else ""
            raise UserError(
                f"row {row.id!r} of {row.source!r} asks the model to {verb} {part.modality}, and it can {verb} "
                f"{able or 'no media'}{why}; add a component for it to model.{kind}, or drop these rows"
            )

    def save_pretrained(self, folder: str | Path) -> None:
        """Write tokenizer, chat format and HF processor into ``folder`` (components save themselves with the model)."""
        settings = self.renderer.save_pretrained(Path(folder))
        Path(folder, _SETTINGS_FILE).write_text(json.dumps(settings, indent=2) + "\n")

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        readers: Mapping[str, MediaAdapter],
        writers: Mapping[str, MediaAdapter],
        native: NativeInputs | None = None,
    ) -> OmniProcessor:
        """Read what :meth:`save_pretrained` wrote; adapters come from ``model.media_adapters()``.

        Args:
            folder: of a saved omni model.
            readers: encoder name -> adapter.
            writers: decoder name -> adapter.
            native: what the foundation reads by itself; None: nothing.

        Raises:
            UserError: ``folder`` holds no omni processor, or no whole tokenizer.
        """
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


def _in_row(row: Row, error: UserError) -> UserError:
    return UserError(f"row {row.id!r} of {row.source!r}: {error}")


def _not_shown(row: Row) -> str:
    """What the row holds and no part of its messages shows: nothing would be learnt of it, and nobody would notice."""
    shown = Counter(part.modality for part in media_parts(row.messages))
    surplus = {
        modality: len(values) for modality, values in row.media.items() if any(map(is_file, values[shown[modality] :]))
    }
    return "; ".join(
        f"the row holds {modality} {count}, the messages show {shown[modality]}: {how_to_show(modality)}"
        for modality, count in surplus.items()
    )

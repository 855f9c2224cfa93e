"""``omnitrain generate --chat``: a conversation in the terminal, with a model that stays loaded."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omnitrain.data.packing.sample import Rejected
from omnitrain.data.sources.rows import MODALITIES, Row
from omnitrain.errors import UserError
from omnitrain.recipe.suggest import hint
from omnitrain.train.verbs.answer import Answerer, require_files, user_message, what_was_cut

_WRITTEN = {".png": "image", ".wav": "audio", ".webp": "video", ".mp4": "video"}  # what an answer has in files
HELP = (
    "/image FILE, /audio FILE, /video FILE: show a file with your next message; /new: forget the conversation; "
    "/exit (or Ctrl-D): end"
)
_COMMANDS = (*(f"/{modality}" for modality in MODALITIES), "/new", "/help", "/exit")


@dataclass
class Conversation:
    """The messages so far, as a row has them, and modality -> files in the order of the parts that show them."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    media: dict[str, list[Any]] = field(default_factory=lambda: {modality: [] for modality in MODALITIES})

    def asked(self, text: str, files: dict[str, list[str]]) -> Conversation:
        """Return the conversation with a user's message, whose media come before the text."""
        media = {modality: [*old, *files[modality]] for modality, old in self.media.items()}
        return Conversation([*self.messages, user_message(text, files)], media)

    def answered(self, parts: list[str | Path]) -> Conversation:
        """Return the conversation with the model's message; ``parts`` are texts and files of media."""
        content, media = [], {modality: list(files) for modality, files in self.media.items()}
        for part in parts:
            modality = "text" if isinstance(part, str) else _WRITTEN[part.suffix]
            content.append({"type": modality, "text": part if isinstance(part, str) else None})
            if not isinstance(part, str):
                media[modality].append(str(part))
        return Conversation([*self.messages, {"role": "assistant", "content": content}], media)

    def row(self) -> Row:
        """Return it as a row to answer."""
        return Row("chat", "chat", self.messages, self.media, extra={})


def chat(answerer: Answerer, read: Callable[[str], str], say: Callable[[str | Path], Any]) -> None:
    """Talk until the user ends it.

    Ctrl-C ends an answer that takes too long, and the conversation goes on without that question. ``read`` raises
    ``EOFError`` at the end of the input.
    """
    conversation, files = Conversation(), _no_files()
    say(HELP)
    while True:
        try:
            line = read("> ").strip()
        except EOFError:
            return
        if line == "/exit":
            return
        if line == "/new":
            conversation, files = Conversation(), _no_files()
        elif line.startswith("/"):
            say(_command(line, files))
        elif line:
            conversation = _turn(answerer, conversation.asked(line, files), say) or conversation
            files = _no_files()


def _no_files() -> dict[str, list[str]]:
    return {modality: [] for modality in MODALITIES}


def _command(line: str, files: dict[str, list[str]]) -> str:
    """Carry out a command with a file, and return what to say about it."""
    try:
        name, *arguments = shlex.split(line)
    except ValueError as error:
        return f"{error}; quote the name of the file"
    if name == "/help":
        return HELP
    if name[1:] not in files:
        return f"no command {line}; {hint(name, _COMMANDS)}"
    try:
        require_files({name[1:]: arguments})
    except UserError as error:
        return str(error)
    files[name[1:]] += arguments
    shown = [file for of_modality in files.values() for file in of_modality]
    return f"your next message shows {', '.join(shown)}" if shown else f"{name} FILE: name a file"


def _turn(answerer: Answerer, asked: Conversation, say: Callable[[str | Path], Any]) -> Conversation | None:
    """Answer the last message. None: there is no answer, and the message is forgotten."""
    try:
        (answered,) = answerer.answers([asked.row()], len(asked.messages))
    except (UserError, KeyboardInterrupt) as error:
        say(str(error) or "stopped; your message is forgotten")
        return None
    if isinstance(answered, Rejected):
        say(f"{answered.reason}; your message is forgotten")
        return None
    parts = answerer.write(answered)
    for part in parts:
        say(part)
    if (cut := what_was_cut(answered, answerer.limit)) is not None:
        say(f"({cut})")
    return asked.answered(parts)

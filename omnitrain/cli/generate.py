"""``omnitrain generate``: a saved model answers a prompt, a file of prompts, or a chat."""

from __future__ import annotations

import contextlib
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omnitrain.errors import UserError

if TYPE_CHECKING:
    from omnitrain.train.verbs.answer import Answerer


class Film(StrEnum):
    """Format of written films."""

    webp = "webp"
    mp4 = "mp4"


def generate(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="Folder of a run, or of a saved omni model.")
    ],
    prompt: Annotated[str | None, typer.Option(help="Text of the user's message; media come before it.")] = None,
    image: Annotated[list[str] | None, typer.Option(metavar="FILE", help="Image file to read; repeatable.")] = None,
    audio: Annotated[list[str] | None, typer.Option(metavar="FILE", help="Audio file to read; repeatable.")] = None,
    video: Annotated[list[str] | None, typer.Option(metavar="FILE", help="Video file to read; repeatable.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            dir_okay=False,
            help="In place of --prompt: a JSON Lines file with `prompt` (and `images`, ...) or `messages` in each "
            "line. The answers are written to answers.jsonl in --output.",
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="In place of --prompt: talk with the model, which stays loaded.")
    ] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="With --prompts: number of prompts to answer at once.")] = 16,
    output: Annotated[Path, typer.Option(metavar="DIR", file_okay=False, help="Folder for generated media.")] = Path(
        "generated"
    ),
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum length of the answer, text and media tokens together.")
    ] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy decoding.")] = 0.0,
    guidance: Annotated[
        float, typer.Option(min=0.0, help="Guidance of media that the model writes; 1: none, and half the work.")
    ] = 1.0,
    size: Annotated[
        str | None, typer.Option(metavar="WxH", help="Size of written images, one of the decoder's `image_sizes`.")
    ] = None,
    films: Annotated[Film, typer.Option(help="Format of written films; mp4 needs PyAV.")] = Film.webp,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of sampling.")] = 0,
    plugin: Annotated[
        list[str] | None,
        typer.Option(metavar="MODULE", help="Module to import first, as in a recipe's `plugins`; repeatable."),
    ] = None,
) -> None:
    """Answer a prompt, a file of prompts, or a chat, with text, images, audio and films, on CUDA if available."""
    media = {"image": image or [], "audio": audio or [], "video": video or []}
    _require_one_source(prompt, prompts, chat, has_media=any(media.values()))

    from omnitrain.train.verbs.answer import require_files

    require_files(media)
    sampling: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    sampling |= {"guidance": guidance, "size": size}
    answerer = _answerer(checkpoint, plugin, output_dir=output, films=films.value, **sampling)
    if chat:
        _chat(answerer)
    elif prompt is not None:
        _answer_prompt(answerer, prompt, media, max_new_tokens)
    elif prompts is not None:
        _answer_file(answerer, prompts, output / "answers.jsonl", batch_size)


def _require_one_source(prompt: str | None, prompts: Path | None, chat: bool, *, has_media: bool) -> None:
    if (prompt is not None) + (prompts is not None) + chat != 1 or (has_media and prompt is None):
        raise UserError(
            "generate needs one of --prompt TEXT (with --image, --audio, --video), --prompts FILE, or --chat (where "
            "/image FILE shows a file)"
        )


def _answerer(checkpoint: Path, plugins: list[str] | None, **options: Any) -> Answerer:
    from omnitrain.recipe.functions import import_plugin
    from omnitrain.train.verbs.answer import Answerer

    for name in plugins or []:
        import_plugin(name)
    return Answerer(checkpoint, **options)


def _answer_prompt(answerer: Answerer, prompt: str, media: dict[str, list[str]], max_new_tokens: int) -> None:
    from omnitrain.train.verbs.answer import what_was_cut

    answered, parts = answerer.answer(prompt, media)
    for part in parts:
        typer.echo(part)
    if not any(str(part).strip() for part in parts):
        typer.echo("omnitrain: the answer has no text and no media", err=True)
    if (cut := what_was_cut(answered, max_new_tokens)) is not None:
        typer.echo(f"omnitrain: {cut}", err=True)


def _answer_file(answerer: Answerer, prompts: Path, answers: Path, batch_size: int) -> None:
    from omnitrain.train.verbs.answer import answer_file

    def say(done: int, of: int) -> None:
        typer.echo(f"{done} of {of} prompts are answered", err=True)

    num_failed = answer_file(answerer, prompts, answers, batch_size, say)
    typer.echo(answers)
    if num_failed:
        raise UserError(f"{num_failed} prompts have no answer; {answers} says why (`error`)")


def _chat(answerer: Answerer) -> None:
    from omnitrain.train.verbs.chat import chat

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - arrow keys and a history for input()
    chat(answerer, input, typer.echo)

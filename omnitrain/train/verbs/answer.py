"""``omnitrain generate``: answer one prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omnitrain.data.packing.sample import Rejected
from omnitrain.data.sources.rows import Row
from omnitrain.errors import UserError
from omnitrain.models.omni.generate import Answer, generate
from omnitrain.recipe import Sampling, Train
from omnitrain.train.build_from_recipe import load_checkpoint
from omnitrain.train.device import use_device
from omnitrain.train.evaluate.media_files import free_stem, write_parts
from omnitrain.train.metrics.display import quiet_libraries


def answer(
    checkpoint: str | Path,
    prompt: str,
    images: list[str],
    audios: list[str],
    videos: list[str],
    *,
    output_dir: str | Path = ".",
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
) -> tuple[Answer, list[str | Path]]:
    """Answer one prompt, on CUDA if available.

    Generated media are written to ``output_dir`` as ``answer_N.png`` and ``answer_N.wav``, or ``answer2_N.png`` and so
    on if an earlier answer has files there.

    Args:
        checkpoint: a saved omni model, or the folder of a run (its newest checkpoint).
        prompt: text; media come before it, in the order images, audios, videos.
        images: image files.
        audios: sound files.
        videos: video files.
        output_dir: folder for generated media; created if missing.
        max_new_tokens: maximum length of the answer, text and media tokens together.
        temperature: sampling temperature; 0 is greedy.
        seed: seed of sampling.

    Returns:
        The answer, and one entry per part: a text, or the path of a written file.

    Raises:
        UserError: the checkpoint or a file does not exist, or the model cannot read a modality.
    """
    quiet_libraries()
    media = {"image": images, "audio": audios, "video": videos}
    if missing := [f"no {m} at {str(f)!r}" for m, files in media.items() for f in files if not Path(f).is_file()]:
        raise UserError(*missing)
    device = use_device(Train())
    model, processor = load_checkpoint(checkpoint, init_device=str(device))
    content: list[dict[str, Any]] = [{"type": m, "text": None} for m, files in media.items() for _ in files]
    message = {"role": "user", "content": [*content, {"type": "text", "text": prompt}]}
    row = Row(id="prompt", source="prompt", messages=[message], media={m: list(f) for m, f in media.items()}, extra={})
    prepared = processor.prompt(row)
    if isinstance(prepared, Rejected):
        raise UserError(prepared.reason)
    sampling = {name: Sampling(temperature=temperature) for name in ("text", *model.decoders)}
    generated = generate(model, processor, [prepared], max_new_tokens=max_new_tokens, sampling=sampling, seed=seed)[0]
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return generated, write_parts(generated.parts, folder, free_stem(folder, "answer"))


def what_was_cut(answer: Answer, max_new_tokens: int) -> str | None:
    """Return what ``max_new_tokens`` cut short, as a sentence; None: nothing."""
    if answer.is_finished:
        return None
    item = answer.unfinished_item
    what = "the answer has no end" if item is None else f"{item} did not finish its last item, which is left out"
    return f"{what}: --max-new-tokens {max_new_tokens} was reached; raise it"

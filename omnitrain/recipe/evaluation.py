"""The ``evaluation`` node: held-out loss, and generation and scoring of answers."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from omnitrain.recipe.functions import FunctionName
from omnitrain.recipe.strict import Idle, Strict


class Sampling(Strict):
    """Sampling of the next token."""

    temperature: float = Field(0.0, ge=0)
    """Sampling temperature; 0 is greedy decoding."""
    top_k: int | None = Field(None, ge=1)
    """Sample from the k most likely tokens."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Sample from the smallest set of tokens with this probability mass."""

    guidance: float = Field(1.0, ge=0, allow_inf_nan=False)
    """Scale of classifier-free guidance (Ho & Salimans 2022): logits are `u + guidance * (c - u)`, where `c` are those
    of the prompt and `u` those without its condition. 1: those of the prompt alone."""

    size: str | None = None
    """Size of the images, one of the decoder's `image_sizes`; for `text`, of images that are words (Emu3). Unset: the
    model chooses."""

    def idle(self) -> Iterator[Idle]:
        """Yield the keys that greedy decoding does not use."""
        if self.temperature == 0:
            for key in ("top_k", "top_p"):
                yield Idle(key, "but `temperature: 0` takes the most likely token; remove it, or raise `temperature`")


class Evaluation(Strict):
    """Held-out loss and generated answers at the end of a run, and during it."""

    every: int | None = Field(None, ge=1)
    """Steps between two evaluations with generated answers and scores during the run. Unset: only at the end."""
    loss_every: int | None = Field(None, ge=1)
    """Steps between two held-out losses in metrics.jsonl. Unset: as often as `every`, and at the end."""
    examples_per_source: int | None = Field(None, ge=1)
    """Number of held-out rows per source. Unset: all."""
    batch_size: int = Field(64, ge=1)
    """Number of prompts to generate for at once."""
    max_new_tokens: int = Field(256, ge=1)
    """Maximum length of an answer, text and media tokens together."""
    sampling: dict[str, Sampling] = Field(default_factory=dict)
    """`text` or the name of a decoder -> how its tokens are sampled. Unset: greedy."""
    ema: bool = False
    """Evaluate the averages of `train.ema` in place of the weights."""
    scorer: FunctionName | None = None
    """`FILE.py:FUNCTION` or `MODULE:FUNCTION`. The function takes the list of answers and returns {name: number}.
    Unset: exact match of the text, per source."""
    saved_samples: int = Field(4, ge=0)
    """Number of generated answers per source to write to `samples/`."""

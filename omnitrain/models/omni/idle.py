"""Samples for ranks that have none, from which a model learns nothing."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np

from omnitrain.data.packing.sample import Sample
from omnitrain.models.discovery import special_ids

_IDLE = "idle"  # source and id of samples for ranks without data; real data may use the same name


def idle_prompt(model: Any, num_tokens: int = 2) -> Sample:
    """Return a sample of ordinary tokens without a loss, for a rank of an ``OmniModel`` that has no sample."""
    native, special = model.runner.native, special_ids(model.foundation.config)
    ids = np.full(num_tokens, next(token for token in count() if token not in special), dtype=np.int64)
    trained = np.zeros(num_tokens, dtype=bool)
    extras = native.extras(ids, trained)
    return Sample(_IDLE, _IDLE, ids, trained, native.positions(ids, {}, extras), index=-1, token_inputs=extras)

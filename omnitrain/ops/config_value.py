"""Read values of a HuggingFace config that may be missing."""

from __future__ import annotations

from typing import Any


def config_value(config: Any, name: str, default: Any = None) -> Any:
    """Return a value of an HF config (or None) for the whole model.

    ``default`` is the result if the config has no such value, or one per layer (transformers' ``per_layer_config``).
    """
    by_layer = getattr(config, "per_layer_attributes", None) or ()
    aliases = getattr(config, "attribute_map", {})
    return default if aliases.get(name, name) in by_layer else getattr(config, name, default)

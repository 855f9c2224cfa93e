"""Read values of a HuggingFace config that may be missing."""

from __future__ import annotations

from typing import Any


def config_value(config: Any, name: str) -> Any:
    """Return a value of an HF config for the whole model; None: the config has no such value, or one per layer."""
    by_layer = getattr(config, "per_layer_attributes", None) or ()
    aliases = getattr(config, "attribute_map", {})
    return None if aliases.get(name, name) in by_layer else getattr(config, name, None)

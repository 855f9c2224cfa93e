"""Read values of a HuggingFace config that may be missing."""

from __future__ import annotations

from typing import Any


def config_value(config: Any, name: str, default: Any = None) -> Any:
    """Return the value of a config for the whole model.

    Args:
        config: an HF config, or None.
        name: name of the value.
        default: result if the config has no such value, or one per layer (transformers' ``per_layer_config``).
    """
    by_layer = getattr(config, "per_layer_attributes", None) or ()
    aliases = getattr(config, "attribute_map", {})
    return default if aliases.get(name, name) in by_layer else getattr(config, name, default)

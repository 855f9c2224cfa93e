"""Values of a HuggingFace config, read by names that it may or may not have."""

from __future__ import annotations

from typing import Any


def config_value(config: Any, name: str, default: Any = None) -> Any:
    """The value that a config has for the whole model.

    Args:
        config: a HF config, or None.
        name: of the value.
        default: where the config has no such value, or one for each layer (transformers' ``per_layer_config``).
    """
    by_layer = getattr(config, "per_layer_attributes", None) or ()
    aliases = getattr(config, "attribute_map", {})
    return default if aliases.get(name, name) in by_layer else getattr(config, name, default)

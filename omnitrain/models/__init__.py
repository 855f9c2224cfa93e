"""``OmniModel``: HuggingFace encoders, a foundation model and decoders as one model."""

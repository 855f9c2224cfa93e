"""Decoders: modalities that the model writes."""

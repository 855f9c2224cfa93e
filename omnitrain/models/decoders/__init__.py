"""Decoders: modalities that the model generates."""

"""Ranks and meshes, layouts applied to a model from outside, and the proof that they do not change the math."""

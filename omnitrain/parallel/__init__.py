"""Ranks and meshes, and what moves between ranks."""

"""Evaluate held-out data: losses, generated answers, scores, and their files."""

"""The commands in addition to ``run``: check, answer, export, verify."""

"""The commands beside ``run``: check, answer, export, verify."""

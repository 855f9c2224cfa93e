"""The folder of a run: its lock, its checkpoints, and resuming."""

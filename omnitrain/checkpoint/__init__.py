"""Save and load the state of a run."""

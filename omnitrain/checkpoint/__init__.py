"""State in and out of a run folder."""

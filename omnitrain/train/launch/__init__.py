"""Start of the ranks of a command."""

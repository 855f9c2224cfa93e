"""Start the ranks of a command."""

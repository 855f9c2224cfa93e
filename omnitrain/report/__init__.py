"""Reports about the machine."""

"""The stall monitor: track the position of each rank, and report the ranks that the others wait for."""

"""The stall monitor: where each rank is, and who waits for whom."""

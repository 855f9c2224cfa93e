"""Plan the layout of a run: what a rank holds, computes and sends, on any number of ranks, in one process."""

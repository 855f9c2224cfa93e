"""FSDP2: choose and shard units, load weights, and gather them temporarily."""

"""FSDP2: what is sharded, how weights come in, and how they are gathered for a while."""

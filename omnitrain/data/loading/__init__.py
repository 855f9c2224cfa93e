"""Order, slots and the data process: the packs of each step, made ahead."""

"""Pipeline parallelism: which stage holds what, how stages send tensors to each other, and shared gradients."""

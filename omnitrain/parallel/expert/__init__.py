"""Expert parallelism: token dispatch and its overlap, load balancing, recorded routing."""

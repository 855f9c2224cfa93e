"""Expert parallelism: dispatch of tokens to experts, its overlap, load balance, recorded routing."""

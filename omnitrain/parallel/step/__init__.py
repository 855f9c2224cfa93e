"""Run a step on many ranks: plan it, exchange media and features, accumulate gradients."""

"""One micro-batch on many ranks: the plan, the exchange of media and features, gradient accumulation."""

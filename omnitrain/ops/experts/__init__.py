"""The experts that omnitrain registers with transformers: rows sorted by expert, grouped matmuls.

A layer's forward dispatches one row for each (token, expert) pair to the experts, computes them and combines the
results per token (``permute.py``). Between ranks a :class:`Dispatcher` of :mod:`omnitrain.parallel` moves the rows.
transformers' ``use_experts_implementation`` declares the format of a layer's weights (``weights.py``). The routing of a
forward is recorded for its recomputation (``routing_tape.py``).
"""

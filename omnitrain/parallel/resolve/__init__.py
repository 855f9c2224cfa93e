"""Merge the plan, the parallel state and the call's arguments into one complete plan per component.

``plans`` runs all checks and raises all problems at once. ``checks`` covers the model as a whole. ``component`` fills
in the plan of one component; ``experts`` and ``memory`` fill in their fields.
"""

from omnitrain.parallel.resolve.plans import dtype_of, resolve_plans, resolve_without_ranks
from omnitrain.parallel.resolve.sources import CallFlags

__all__ = ["CallFlags", "dtype_of", "resolve_plans", "resolve_without_ranks"]

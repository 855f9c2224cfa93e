"""One complete plan per component, from what the plan, the parallel state and the call say of it.

``plans`` asks for everything and raises all problems at once; ``model_problems`` are those of a model as a whole;
``component`` makes a component's plan, with what ``experts`` and ``memory`` say of their fields.
"""

from omnitrain.parallel.resolve.plans import dtype_of, require_fit, resolve_plans
from omnitrain.parallel.resolve.sources import CallFlags

__all__ = ["CallFlags", "dtype_of", "require_fit", "resolve_plans"]

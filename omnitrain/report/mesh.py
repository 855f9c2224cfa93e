"""The ranks of a section as a picture: a box per rank, in frames of the mesh's axes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from markupsafe import Markup

from omnitrain.plan.mesh import DENSE_AXES, MeshShape
from omnitrain.report.html import NUM_COLORS, rendered

_DRAWN = 64  # ranks of a section; of more, the first ones along the outer axes stand for all
_NAMES = {"sp": "ulysses"}  # the recipe's word for an axis


def mesh_picture(section: Mapping[str, Any], index: int) -> Markup:
    """Return a picture of a section (of ``layout.json``) as HTML; ``index``: of its first colour."""
    mesh = MeshShape(**section["axes"], ep=section["ep"])
    axes = [axis for axis in DENSE_AXES if mesh.size(axis) > 1]
    ranks = np.arange(mesh.world_size).reshape([mesh.size(axis) for axis in axes])
    for dim in range(ranks.ndim):
        most = max(_DRAWN // math.prod(ranks.shape[dim + 1 :]), 1)
        ranks = ranks.take(range(min(most, ranks.shape[dim])), axis=dim)
    return rendered(
        "mesh.html",
        title=f"{section['name']}: {mesh} ({', '.join(section['components'])})",
        first_rank=section["first_rank"],
        mesh=mesh,
        ranks=ranks.tolist(),
        names=[_NAMES.get(axis, axis) for axis in axes],
        num_drawn=ranks.size,
        experts=mesh.ranks_in("ep"),
        colors=(index + mesh.ranks_in("pp")) % NUM_COLORS,
    )

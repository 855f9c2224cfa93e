"""Ships ``recipes/`` and ``tasks/`` inside the package: a checkout has them at the top, a wheel in ``omnitrain/``."""

from setuptools import find_packages, setup

TASKS = ("quickstart", "mixture")  # recipes name their files

setup(
    packages=[
        *find_packages(include=["omnitrain", "omnitrain.*"]),
        "omnitrain.recipes",
        *(f"omnitrain.tasks.{name}" for name in TASKS),
    ],
    package_dir={"omnitrain.recipes": "recipes"} | {f"omnitrain.tasks.{name}": f"tasks/{name}" for name in TASKS},
    package_data={
        "omnitrain": ["py.typed"],
        "omnitrain.recipes": ["*.yaml"],
        "omnitrain.report": ["templates/*"],
        "omnitrain.tasks.quickstart": ["README.md", "data/*", "tokenizers/*/*"],
    },
)

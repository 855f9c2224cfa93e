"""Ships ``recipes/`` inside the package: a checkout has it at the top, an installed wheel as ``omnitrain/recipes``."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["omnitrain", "omnitrain.*"]), "omnitrain.recipes"],
    package_dir={"omnitrain.recipes": "recipes"},
    package_data={
        "omnitrain": ["py.typed"],
        "omnitrain.recipes": ["*.yaml"],
        "omnitrain.report": ["templates/*"],
    },
)

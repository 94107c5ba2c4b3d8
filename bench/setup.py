"""The benches and the product are one version, that of the product's `pyproject.toml`."""

import tomllib
from pathlib import Path

from setuptools import setup

PRODUCT = Path(__file__).resolve().parents[1] / "pyproject.toml"
VERSION = tomllib.loads(PRODUCT.read_text())["project"]["version"]

setup(version=VERSION, install_requires=[f"exo-node=={VERSION}", "matplotlib>=3.9"])

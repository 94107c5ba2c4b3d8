"""A g++ that MLX cannot use, as that of Ubuntu 24.04."""

import shutil
import sys

import pytest

BROKEN = """#!/bin/sh
[ "$1" = --version ] && exit 0
echo "x.cpp:1:2: error: redeclaration of C++ built-in type '_Float32'"
exit 1
"""

needs_gxx = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None, reason="MLX compiles by g++ on Linux"
)

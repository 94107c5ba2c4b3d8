"""Bytes of one number, by dtype. Free of cards, whose library a runner does without."""

from typing import Final

BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}

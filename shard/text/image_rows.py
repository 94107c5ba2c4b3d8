"""The rows of images in a prompt: their ids, and their places among the ids of the text.

A row of an image has an id below 0 of 31 bits, made of the image's hash and the row's number, so
that equal ids are equal rows. See docs/decisions/images.md.
"""

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...placement.errors import PROMPT, InvalidRequest
from ..checkpoint.checkpoint import read_config
from ..checkpoint.vision import Vision, vision_of


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """An image as a tower takes it."""

    rows: int
    """Rows of the prompt that it takes."""
    grid: tuple[int, ...]
    """Patches by time, height and width."""
    digest: bytes
    """The hash of everything that its features depend on, but for the tower."""
    pixels: bytes = field(repr=False)
    """A byte for each number of a patch, patch by patch; within it by colour."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """One for each colour; for numbers from 0 to 1."""
    line_ends: tuple[int, ...] = ()
    """The ids whose embeddings end each line of its rows, and the last one; or empty."""

    @property
    def ids(self) -> list[int]:
        """The ids of its rows, below 0."""
        stream = hashlib.shake_256(self.digest).digest(4 * self.rows)
        return [-1 - (bits >> 1) for (bits,) in struct.iter_unpack("<I", stream)]


def digest_of(pixels: bytes, grid: Sequence[int], *settings: Sequence[float]) -> bytes:
    """The hash of an image's patches and of what they mean."""
    digest = hashlib.sha256(json.dumps([*grid, settings]).encode())
    digest.update(pixels)
    return digest.digest()


def vision_in(folder: Path) -> Vision | None:
    """How the model of a folder reads images, by its config.json. Raises InvalidCheckpoint."""
    return vision_of(read_config(folder)) if (folder / "config.json").exists() else None


def image_frame(folder: Path, tokenizer: Any) -> tuple[str, str] | None:
    """The token that a chat template writes for an image, and the text that Gemma 3's processor
    puts in its place before a prompt is tokenised: newlines join those around them. None if
    placeholders stay as the template writes them."""
    vision = vision_in(folder)
    if vision is None or vision.frame is None:
        return None
    ids = [vision.frame[0], vision.placeholder, vision.frame[1]]
    tokens: list[Any] = tokenizer.convert_ids_to_tokens(ids)
    if not all(isinstance(token, str) and token for token in tokens):
        return None
    begin, image, end = tokens
    return begin, f"\n\n{begin}{image}{end}\n\n"


def with_image_rows(
    ids: Sequence[int], placeholder: int, images: Sequence[PreparedImage]
) -> list[int]:
    """A rendered prompt with each placeholder replaced by the rows of an image.

    Raises InvalidRequest unless there are as many.
    """
    places = [place for place, token in enumerate(ids) if token == placeholder]
    if len(places) != len(images):
        raise InvalidRequest(
            f"the model's chat template has places for {len(places)} of {len(images)} images; put "
            "images into messages of the role user",
            param=PROMPT,
        )
    prompt, begin = list[int](), 0
    for place, image in zip(places, images, strict=True):
        prompt += [*ids[begin:place], *image.ids]
        begin = place + 1
    return [*prompt, *ids[begin:]]


def require_rows(prompt: Sequence[int], images: Sequence[PreparedImage]) -> None:
    """Requires the ids below 0 to be those of `images`, in order. Raises InvalidRequest."""
    below = [token for token in prompt if token < 0]
    if below != [token for image in images for token in image.ids]:
        raise InvalidRequest("the prompt has rows of images that it does not send", param="images")

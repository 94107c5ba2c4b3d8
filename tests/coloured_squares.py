"""Pictures of coloured squares on a plain ground, which the model in tests/squares reads."""

import io
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from PIL import Image, ImageDraw

MODEL: Final = Path(__file__).parent / "squares"
COLOURS: Final = {
    "red": (205, 40, 45),
    "orange": (240, 140, 35),
    "yellow": (240, 220, 60),
    "green": (45, 150, 65),
    "blue": (45, 90, 210),
    "purple": (140, 60, 170),
    "black": (25, 25, 30),
    "white": (240, 240, 240),
}
MOST: Final = 5
"""Squares in a picture."""
SIDES: Final = (64, 112)
"""The shortest and the longest side of a picture, in pixels."""
HELD_OUT: Final = 1 << 32
"""Training draws the pictures of smaller seeds."""
_SQUARES: Final = (16, 36)
_GAP: Final = 8
_JITTER: Final = 14
_CONTRAST: Final = 130.0

Box = tuple[int, int, int]
"""Left, top and side of a square."""
Colour = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture and what is right to say of it."""

    image: Image.Image
    count: int
    colour: str
    boxes: tuple[Box, ...]

    @property
    def answer(self) -> str:
        return f"{self.count} {self.colour} square{'s' if self.count > 1 else ''}"

    def file(self, kind: str = "PNG") -> bytes:
        """The bytes of a file of `kind`, which Pillow knows."""
        data = io.BytesIO()
        self.image.save(data, kind)
        return data.getvalue()


def picture(seed: int) -> Picture:
    """The same for the same seed; unseen from `HELD_OUT` on."""
    draw = random.Random(seed)
    width, height = draw.randint(*SIDES), draw.randint(*SIDES)
    boxes = _boxes(draw, width, height, draw.randint(1, MOST))
    name = draw.choice(sorted(COLOURS))
    fill = _near(draw, COLOURS[name])
    image = Image.new("RGB", (width, height), _ground(draw, fill))
    pen = ImageDraw.Draw(image)
    for left, top, side in boxes:
        pen.rectangle((left, top, left + side - 1, top + side - 1), fill=fill)
    return Picture(image, len(boxes), name, tuple(boxes))


def unseen(number: int) -> Picture:
    """One that the model was not trained on."""
    return picture(HELD_OUT + number)


def copy_model(folder: Path) -> None:
    """Puts the trained model's files into a new folder, which may be one of --models-dir."""
    _ = shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.py", "*.md", "__pycache__"))


def _boxes(draw: random.Random, width: int, height: int, wanted: int) -> list[Box]:
    """At least one, and fewer than wanted where no more fit without touching each other."""
    found = list[Box]()
    for _ in range(60):
        side = draw.randint(*_SQUARES)
        left, top = draw.randint(0, width - side), draw.randint(0, height - side)
        if all(
            left + side + _GAP <= x or x + s + _GAP <= left or top + side + _GAP <= y
            or y + s + _GAP <= top
            for x, y, s in found
        ):  # fmt: skip
            found.append((left, top, side))
        if len(found) == wanted:
            break
    return found


def _near(draw: random.Random, colour: Colour) -> Colour:
    red, green, blue = (min(255, max(0, c + draw.randint(-_JITTER, _JITTER))) for c in colour)
    return red, green, blue


def _ground(draw: random.Random, fill: Colour) -> Colour:
    """Any colour that stands out from the squares'."""
    while True:
        ground = draw.randrange(256), draw.randrange(256), draw.randrange(256)
        if sum((a - b) ** 2 for a, b in zip(ground, fill, strict=True)) > _CONTRAST**2:
            return ground

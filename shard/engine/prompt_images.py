"""The images of one request's prompt: where their rows are, and what the model reads there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from ...mtp.families.placed_rope import RopePositions
from ...mtp.pieces import Pieces, by_layers
from ...mtp.seams import as_row
from ...mtp.targets import PromptReader
from ..model.tower import Features, Tower
from ..text.image_rows import PreparedImage

_AROUND: Final = (1, 2, 3, 4)
"""Ids before and behind the image with which towers are tried."""


@dataclass(slots=True, eq=False)
class _Placed:
    image: PreparedImage
    begin: int
    """Its first row."""
    place: int
    """Its first position."""
    sides: tuple[int, int, int]
    """Rows by time, height and width."""
    length: int
    """Positions that it takes."""
    features: Features | None = None

    @property
    def end(self) -> int:
        return self.begin + self.image.rows

    @property
    def delta(self) -> int:
        """The position of rows after it less their number."""
        return self.place + self.length - self.end


class PromptImages:
    """All methods but the constructor run on the compute thread."""

    def __init__(
        self,
        prompt: Sequence[int],
        images: Sequence[PreparedImage],
        tower: Tower,
        embed: Callable[[mx.array], mx.array],
    ) -> None:
        """`images`: of the rows with ids below 0, in order. `embed`: ids (1, n) -> (1, n, H)."""
        self._prompt = prompt
        self._tower = tower
        self._embed = embed
        self._placed = list[_Placed]()
        self._steps = list[mx.array]()
        row, delta, merge = 0, 0, tower.vision.merge
        for image in images:
            row = next(r for r in range(row, len(prompt)) if prompt[r] < 0)
            time, height, width = image.grid
            sides = (time, height // merge, width // merge)
            length = max(sides) if self.has_places else image.rows
            self._placed.append(_Placed(image, row, row + delta, sides, length))
            row, delta = self._placed[-1].end, self._placed[-1].delta

    @property
    def delta(self) -> int:
        """The difference of positions after the prompt from row numbers."""
        return self._placed[-1].delta

    @property
    def deep_layers(self) -> int:
        """The model's first layers whose outputs get features added."""
        return self._tower.vision.deep

    @property
    def has_places(self) -> bool:
        """Whether positions of image rows have three dimensions; else they are their numbers."""
        return bool(self._tower.vision.section)

    def delta_at(self, row: int) -> int:
        """The same of a row before or after an image."""
        return next((p.delta for p in reversed(self._placed) if p.end <= row), 0)

    def touches(self, begin: int, end: int) -> bool:
        """Whether any of the rows [begin, end) is an image's."""
        return any(p.begin < end and begin < p.end for p in self._placed)

    def ids(self, begin: int, end: int) -> Sequence[int]:
        """The ids of the rows [begin, end)."""
        return self._prompt[begin:end]

    def places(self, begin: int, end: int) -> mx.array:
        """The positions (3, n) of the rows [begin, end)."""
        return mx.array(self.place_rows(begin, end), dtype=mx.int32).T

    def placing(self, begin: int, end: int) -> tuple[int, tuple[int, ...]]:
        """The positions of the rows [begin, end), as other runners get them: `BlockMember.delta`
        and `HiddenBlock.places`."""
        if not (self.has_places and self.touches(begin, end)):
            return self.delta_at(begin), ()
        axes = zip(*self.place_rows(begin, end), strict=True)
        return 0, tuple(place for axis in axes for place in axis)

    def place_rows(self, begin: int, end: int) -> list[tuple[int, int, int]]:
        """`places` by row."""
        rows, row = list[tuple[int, int, int]](), begin
        for placed in self._placed:
            delta = self.delta_at(row)
            until = min(end, placed.begin)
            rows += [_of_text(r + delta) for r in range(row, until)]
            row = max(row, until)
            _, height, width = placed.sides
            for r in range(row, min(end, placed.end)):
                number = r - placed.begin
                slab, within = divmod(number, height * width)
                down, right = divmod(within, width)
                start = placed.place
                rows.append((start + slab, start + down, start + right))
                row = r + 1
        delta = self.delta_at(row)
        return rows + [_of_text(r + delta) for r in range(row, end)]

    def embeddings(self, begin: int, end: int) -> mx.array:
        """The embeddings (1, n, H) that the model reads at the rows [begin, end); lazy.

        Forgets the features of images that end in front of them: prompts are read in order.
        """
        parts, row = list[mx.array](), begin
        for placed in self._placed:
            if placed.end < begin:
                placed.features = None
                continue
            if end <= placed.begin:
                break
            if row < placed.begin:
                parts.append(self._of_text(row, placed.begin))
                row = placed.begin
            if row < placed.end:
                until = min(end, placed.end)
                features = self._features_of(placed).rows
                parts.append(features[row - placed.begin : until - placed.begin][None])
                row = until
        if row < end:
            parts.append(self._of_text(row, end))
        dtype = self._embed(mx.zeros((1, 1), mx.int32)).dtype
        return mx.concatenate([part.astype(dtype) for part in parts], axis=1)

    def deep(self, begin: int, end: int) -> list[mx.array]:
        """Additions to the outputs of the first layers, (1, n, H) each; lazy."""
        touched = [p for p in self._placed if p.begin < end and begin < p.end]
        added = list[mx.array]()
        for layer in range(self._tower.vision.deep):
            parts, row = list[mx.array](), begin
            for placed in touched:
                rows = self._features_of(placed).deep[layer]
                parts.append(mx.zeros((max(0, placed.begin - row), rows.shape[1]), rows.dtype))
                row = max(row, placed.begin)
                until = min(end, placed.end)
                parts.append(rows[row - placed.begin : until - placed.begin])
                row = until
            parts.append(mx.zeros((end - row, parts[0].shape[1]), parts[0].dtype))
            added.append(mx.concatenate(parts)[None])
        return added

    def _features_of(self, placed: _Placed) -> Features:
        if placed.features is None:
            features = self._tower.features(placed.image)
            self._steps += features.steps
            placed.features = features._replace(rows=self._with_line_ends(features.rows, placed))
        return placed.features

    def _with_line_ends(self, rows: mx.array, placed: _Placed) -> mx.array:
        """The features of all rows: of its patches, and the embeddings that end lines."""
        if not placed.image.line_ends:
            return rows
        _, height, width = placed.sides
        line, last = placed.image.line_ends
        ends = self._embed(as_row([line] * (height - 1) + [last])[None])[0][:, None]
        lines = rows.reshape(height, width, -1).astype(ends.dtype)
        return mx.concatenate([lines, ends], axis=1).flatten(0, 1)

    def take_steps(self) -> list[mx.array]:
        """Outputs of the towers' layers, on the way to the features, since the last call."""
        steps, self._steps = self._steps, []
        return steps

    def _of_text(self, begin: int, end: int) -> mx.array:
        return self._embed(as_row(self._prompt[begin:end])[None])


def _of_text(position: int) -> tuple[int, int, int]:
    return position, position, position


def set_places(
    positions: RopePositions, images: PromptImages | None, begin: int, end: int
) -> mx.array | None:
    """Sets the positions and the mask of a forward over the rows [begin, end) of a prompt. Returns
    what it reads in place of its ids' embeddings, if any row is an image's."""
    if images is None or not images.touches(begin, end):
        positions.set_deltas([0 if images is None else images.delta_at(begin)])
        return None
    embeddings = images.embeddings(begin, end)
    if images.has_places:
        positions.at(images.places(begin, end), images.deep(begin, end))
    else:
        positions.set_deltas([0])
    positions.join(images.ids(begin, end))
    return embeddings


def read_samples(
    tower: Tower,
    embed: Callable[[mx.array], mx.array],
    target: PromptReader,
    make_caches: Callable[[], list[Any]],
) -> Pieces[None]:
    """Reads each of the tower's samples between rows of text, a layer a piece: on a GPU the first
    image on a machine waits for kernels that are compiled for it."""
    for image in tower.samples():
        yield
        prompt, caches = [*_AROUND, *image.ids, *_AROUND], make_caches()
        images = PromptImages(prompt, [image], tower, embed)
        embeddings = set_places(target.rope_positions, images, 0, len(prompt))
        output = target.forward(as_row(prompt), caches, want="last", embeddings=embeddings)
        for step in images.take_steps():
            yield
            mx.eval(step)
        yield from by_layers([caches], output.logits)

"""Decodes an image file within limits and cuts it into a tower's patches; the helper's part.

The file comes from a client. Pillow reads its header, and the limits hold before it decodes.
"""

import io
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from ...placement.errors import InvalidRequest
from ..checkpoint.headers import fault as file_fault
from ..checkpoint.headers import optional_object
from ..checkpoint.vision import Vision
from .image_rows import PreparedImage, digest_of, vision_in

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_DECODED_PIXELS: Final = 1 << 26
"""Pixels of a file, of its first frame: more than the 8064 x 6048 of a telephone. Decoding and
scaling take 12 bytes a pixel at most: a progressive JPEG's coefficients in CMYK."""
MAX_WEBP_PIXELS: Final = 1 << 25
"""The same of WebP, whose decoder takes 20 bytes a pixel."""
MAX_PIXELS: Final = 1 << 22
"""Pixels that a tower gets of one image at most."""
SETTINGS: Final = "preprocessor_config.json"
MARKS: Final = "processor_config.json"
"""Names tokens around images; newer repositories have the settings in it, too."""
_FIELDS: Final = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")
_DEEP: Final = ("I", "I;16", "I;16L", "I;16B", "I;16N")
"""Pillow's modes of more than eight bits, which its conversion to RGB would cut off."""
_STRIP: Final = 1 << 20
"""Pixels that are converted to RGB at a time, which takes several times their bytes."""
MAX_SCANS: Final = 100
"""The most scans of a JPEG, whose decoder passes over all pixels for each. Encoders write 10, or
some dozens where they try to save bytes."""
MAX_SCANNED_PIXELS: Final = 1 << 30
"""Scans times pixels: 16 scans of the largest image."""
_MAX_JPEG_MARKERS: Final = 10_000
_JPEG_START: Final = b"\xff\xd8"
_JPEG_SCAN: Final = 0xDA
_JPEG_END: Final = 0xD9
_JPEG_MARKER: Final = re.compile(rb"\xff[^\x00\x01\xff\xd0-\xd8]")
"""The next marker (ITU-T T.81, annex B) that has a segment or ends the image: others are within a
scan's data."""


class PictureProcessor:
    """transformers' own processor of a model's images, with the checkpoint's settings."""

    def __init__(self, folder: Path, id_of: Callable[[str], object]) -> None:
        """`id_of`: the id of one of the tokenizer's tokens. Raises InvalidCheckpoint."""
        vision = vision_in(folder)
        if vision is None:
            raise file_fault(folder / "config.json", "describes no images that are built in")
        notes: list[str] = []
        path = folder / SETTINGS
        settings: dict[str, Any] = optional_object(path, notes)
        marks: dict[str, Any] = optional_object(folder / MARKS, notes)
        if not settings and isinstance(marks.get("image_processor"), dict):
            path, settings = folder / MARKS, marks["image_processor"]
        if not settings:
            what = f"cannot be used ({'; '.join(notes)})" if notes else "is missing"
            raise file_fault(path, f"{what}, so its images cannot be scaled")
        self._vision = vision
        self._line_ends = _line_ends(marks, id_of) if vision.ends_lines else ()
        if self._line_ends is None:
            raise file_fault(folder / MARKS, "names tokens that end an image's lines, but no ids")
        try:
            self._cutter = _CUTTERS[vision.kind](settings, vision, path)
            self._mean = tuple(float(each) for each in settings["image_mean"])
            self._std = tuple(float(each) for each in settings["image_std"])
        except (KeyError, TypeError, ValueError) as fault:
            raise file_fault(path, f"does not describe a processor ({fault})") from fault

    def prepare(self, data: bytes) -> PreparedImage:
        """An image file as the tower takes it. Raises InvalidRequest without a field."""
        grid, numbers = self._cutter.cut(_decoded(data, self._require_scalable))
        pixels = numbers.round().astype("uint8").tobytes()
        digest, rows = digest_of(pixels, grid, self._mean, self._std), self._vision.rows(grid)
        scale = self._mean, self._std
        return PreparedImage(rows, grid, digest, pixels, *scale, self._line_ends or ())

    def _require_scalable(self, width: int, height: int) -> None:
        try:
            self._cutter.check(width, height)
        except ValueError as fault:
            raise InvalidRequest(
                f"the image of {width} x {height} cannot be scaled ({fault}); crop it"
            ) from fault


def _line_ends(marks: Mapping[str, Any], id_of: Callable[[str], object]) -> tuple[int, int] | None:
    """The ids at the ends of a line and of an image, or None if the tokenizer has none."""
    usual = {"image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
    line, last = (id_of(str(marks.get(name, token))) for name, token in usual.items())
    return (line, last) if type(line) is int and type(last) is int and line != last else None


class _Cutter(NamedTuple):
    """How one family's processor scales images."""

    processor: Any
    cut: Callable[[Any], tuple[tuple[int, ...], Any]]
    """An image (height, width, 3) scaled: its patches by time, height and width, and its numbers
    from 0 to 255."""
    check: Callable[[int, int], None]
    """Scales a width and a height. Raises ValueError if they cannot be."""


def _qwen(settings: Mapping[str, Any], vision: Vision, path: Path) -> _Cutter:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    del vision
    size = cast("dict[str, Any]", settings.get("size") or {})
    least: Any
    most: Any
    least = settings.get("min_pixels") or size.get("shortest_edge")
    most = settings.get("max_pixels") or size.get("longest_edge")
    if not all(isinstance(each, int) and each > 0 for each in (least, most)):
        raise file_fault(path, "has no size with shortest_edge and longest_edge")
    edges: dict[str, int] = {"shortest_edge": least, "longest_edge": min(most, MAX_PIXELS)}
    chosen: dict[str, Any] = {name: settings[name] for name in _FIELDS}
    processor = Qwen2VLImageProcessorPil(size=edges, **chosen)

    def cut(image: Any) -> tuple[tuple[int, ...], Any]:
        output = processor(image, **_AS_IT_IS)
        return tuple(int(each) for each in output["image_grid_thw"][0]), output["pixel_values"]

    def check(width: int, height: int) -> None:
        _ = processor.get_number_of_image_patches(height, width)

    return _Cutter(processor, cut, check)


def _gemma(settings: Mapping[str, Any], vision: Vision, path: Path) -> _Cutter:
    """Without crops of wide images ("pan and scan"), which the published settings leave off."""
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    side, patch = vision.tower["image_size"], vision.tower["patch_size"]
    if settings["size"] != {"height": side, "width": side} or side**2 > MAX_PIXELS:
        raise file_fault(path, "has another size than the vision tower of config.json")
    processor: Any = Gemma3ImageProcessorPil(
        size=settings["size"], resample=settings.get("resample", 2)
    )

    def cut(image: Any) -> tuple[tuple[int, ...], Any]:
        output = processor(image, do_pan_and_scan=False, **_AS_IT_IS)
        return (1, side // patch, side // patch), output["pixel_values"][0]

    def check(_width: int, _height: int) -> None:
        """All images become one square."""

    return _Cutter(processor, cut, check)


def _mistral(settings: Mapping[str, Any], vision: Vision, path: Path) -> _Cutter:
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    longest: Any = settings["size"]["longest_edge"]
    patch, row = vision.tower["patch_size"], vision.tower["patch_size"] * vision.merge
    side = vision.tower["image_size"] // row * row
    if type(longest) is not int or not row <= longest or side**2 > MAX_PIXELS or longest > side:
        raise file_fault(path, "has a longest_edge that the vision tower of config.json has not")
    processor: Any = PixtralImageProcessorPil(
        size={"longest_edge": longest},
        patch_size={"height": row, "width": row},
        resample=settings.get("resample", 3),
    )

    def cut(image: Any) -> tuple[tuple[int, ...], Any]:
        numbers = processor(image, **_AS_IT_IS)["pixel_values"][0]
        _, height, width = numbers.shape
        return (1, height // patch, width // patch), numbers

    def check(width: int, height: int) -> None:
        if min(width, height) * longest < max(width, height):
            raise ValueError(f"one side has more than {longest} times the pixels of the other")

    return _Cutter(processor, cut, check)


_CUTTERS: Final = {"qwen": _qwen, "gemma": _gemma, "mistral": _mistral}
_AS_IT_IS: Final[dict[str, Any]] = {
    "input_data_format": "channels_last",
    "do_rescale": False,
    "do_normalize": False,
    "return_tensors": "np",
}


def _decoded(data: bytes, require_scalable: Callable[[int, int], None]) -> Any:
    """The first frame of a file, upright, as RGB on white: (height, width, 3).

    `require_scalable`: raises for a width and a height. Raises InvalidRequest.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    # Pillow refuses more than twice this number, before it decodes, and warns of less.
    Image.MAX_IMAGE_PIXELS = MAX_DECODED_PIXELS // 2
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            if image.format == "WEBP" and image.width * image.height > MAX_WEBP_PIXELS:
                raise _too_many("WebP image", MAX_WEBP_PIXELS, " or send it as JPEG")
            require_scalable(*image.size)
            require_few_scans(data, image.width * image.height)
            image.load()
            ImageOps.exif_transpose(image, in_place=True)
            return _rgb(image)
    except Image.DecompressionBombError as fault:
        raise _too_many("image", MAX_DECODED_PIXELS) from fault
    except UnidentifiedImageError as fault:
        kinds = ", ".join(FORMATS)
        raise InvalidRequest(f"the image is none of {kinds}; convert it") from fault
    # What Pillow raises for files that are damaged: any of these, by format.
    except (OSError, EOFError) as fault:
        raise InvalidRequest(
            f"the image is damaged or truncated ({type(fault).__name__}); send it again whole"
        ) from fault
    except (SyntaxError, ValueError, IndexError, TypeError, KeyError) as fault:
        raise InvalidRequest(
            f"the image's headers or metadata are damaged or too large ({type(fault).__name__}); "
            "save it again without metadata"
        ) from fault


def _too_many(kind: str, most: int, or_else: str = "") -> InvalidRequest:
    return InvalidRequest(
        f"the {kind} has more than {most // 10**6} million pixels; scale it down{or_else}"
    )


def require_few_scans(data: bytes, pixels: int) -> None:
    """Refuses a JPEG of more scans than its `pixels` may have. Raises InvalidRequest."""
    most = min(MAX_SCANS, MAX_SCANNED_PIXELS // max(1, pixels))
    if data.startswith(_JPEG_START) and _has_more_scans(data, most):
        raise InvalidRequest(
            f"the JPEG has more than {most} scans, which take long to decode; save it again as a "
            "baseline JPEG, or as PNG"
        )


def _has_more_scans(data: bytes, most: int) -> bool:
    """Stops after `most`. A file of more markers than any photo counts as one of more scans."""
    position, scans = len(_JPEG_START), 0
    for _ in range(_MAX_JPEG_MARKERS):
        marker = _JPEG_MARKER.search(data, position)
        if marker is None or data[marker.end() - 1] == _JPEG_END:
            return False
        scans += data[marker.end() - 1] == _JPEG_SCAN
        if scans > most:
            return True
        position = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2])
    return True


def _rgb(image: Any) -> Any:
    """Converts strip by strip."""
    import numpy as np

    rgb = np.empty((image.height, image.width, 3), np.uint8)
    step = max(1, _STRIP // image.width)
    for top in range(0, image.height, step):
        strip = image.crop((0, top, image.width, min(top + step, image.height)))
        rgb[top : top + step] = np.asarray(_rgb_strip(strip))
    return rgb


def _rgb_strip(image: Any) -> Any:
    import numpy as np
    from PIL import Image

    if image.mode in _DEEP:
        image = Image.fromarray((np.asarray(image) / 257.0).round().clip(0, 255).astype(np.uint8))
    if "A" in image.mode or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


def header_of(image: PreparedImage) -> dict[str, Any]:
    """All of an image but its pixels, as JSON values."""
    fields = {"rows": image.rows, "grid": image.grid, "mean": image.mean, "std": image.std}
    return {**fields, "digest": image.digest.hex(), "line_ends": image.line_ends}


def image_of(header: Mapping[str, Any], pixels: bytes) -> PreparedImage:
    """The inverse of `header_of`."""
    names = ("grid", "mean", "std", "line_ends")
    sequences: dict[str, Any] = {name: tuple(header[name]) for name in names}
    digest = bytes.fromhex(header["digest"])
    return PreparedImage(rows=header["rows"], digest=digest, pixels=pixels, **sequences)

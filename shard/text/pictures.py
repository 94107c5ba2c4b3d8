"""Decodes an image file within limits and cuts it into a tower's patches; the helper's part.

The file comes from a client. Pillow reads its header, and the limits hold before it decodes.
"""

import io
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, cast

from ...placement.errors import InvalidRequest
from ..checkpoint.headers import fault as file_fault
from ..checkpoint.headers import parse_object, read_bytes, size_of
from .image_rows import PreparedImage, digest_of

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_DECODED_PIXELS: Final = 1 << 26
"""Pixels of a file, of its first frame: more than the 8064 x 6048 of a telephone. Decoding and
scaling take 12 bytes a pixel at most: a progressive JPEG's coefficients in CMYK."""
MAX_WEBP_PIXELS: Final = 1 << 25
"""The same of WebP, whose decoder takes 20 bytes a pixel."""
MAX_PIXELS: Final = 1 << 22
"""Pixels that a tower gets of one image, which is scaled down to them."""
SETTINGS: Final = "preprocessor_config.json"
_FIELDS: Final = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")
_DEEP: Final = ("I", "I;16", "I;16L", "I;16B", "I;16N")
"""Pillow's modes of more than eight bits, which its conversion to RGB would cut off."""
_STRIP: Final = 1 << 20
"""Pixels that are converted to RGB at a time, which takes several times their bytes."""


class PictureProcessor:
    """transformers' own processor of the Qwen towers, with a checkpoint's settings."""

    def __init__(self, folder: Path) -> None:
        """Raises InvalidCheckpoint."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        path = folder / SETTINGS
        if not path.exists():
            raise file_fault(path, "is missing, so its images cannot be scaled")
        settings = parse_object(path, read_bytes(path, 0, size_of(path)), unique=False)
        size = cast("dict[str, Any]", settings.get("size") or {})
        least: Any
        most: Any
        least = settings.get("min_pixels") or size.get("shortest_edge")
        most = settings.get("max_pixels") or size.get("longest_edge")
        if not all(isinstance(each, int) and each > 0 for each in (least, most)):
            raise file_fault(path, "has no size with shortest_edge and longest_edge")
        edges: dict[str, int] = {"shortest_edge": least, "longest_edge": min(most, MAX_PIXELS)}
        try:
            chosen: dict[str, Any] = {name: settings[name] for name in _FIELDS}
            self._processor = Qwen2VLImageProcessorPil(size=edges, **chosen)
            self._mean = [float(each) for each in chosen["image_mean"]]
            self._std = [float(each) for each in chosen["image_std"]]
            self._merged = int(chosen["merge_size"]) ** 2
        except (KeyError, TypeError, ValueError) as fault:
            raise file_fault(path, f"does not describe a processor ({fault})") from fault

    def prepare(self, data: bytes) -> PreparedImage:
        """The patches of an image file. Raises InvalidRequest without a field."""
        output = self._processor(
            _decoded(data, self._require_scalable),
            input_data_format="channels_last",
            do_rescale=False,
            do_normalize=False,
            return_tensors="np",
        )
        grid = tuple(int(each) for each in output["image_grid_thw"][0])
        patches = output["pixel_values"].round().astype("uint8")
        rows = grid[0] * grid[1] * grid[2] // self._merged
        pixels = patches.tobytes()
        digest = digest_of(pixels, grid, self._mean, self._std)
        return PreparedImage(rows, grid, digest, pixels, tuple(self._mean), tuple(self._std))

    def _require_scalable(self, width: int, height: int) -> None:
        try:
            _ = self._processor.get_number_of_image_patches(height, width)
        except ValueError as fault:
            raise InvalidRequest(
                f"the image of {width} x {height} cannot be scaled ({fault}); crop it"
            ) from fault


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


def header_of(image: PreparedImage) -> bytes:
    """All of an image but its pixels, as JSON."""
    fields = {"rows": image.rows, "grid": image.grid, "mean": image.mean, "std": image.std}
    return json.dumps({**fields, "digest": image.digest.hex()}).encode()


def image_of(header: bytes, pixels: bytes) -> PreparedImage:
    """The inverse of `header_of`."""
    fields: Mapping[str, Any] = json.loads(header)
    return PreparedImage(
        fields["rows"],
        tuple(fields["grid"]),
        bytes.fromhex(fields["digest"]),
        pixels,
        tuple(fields["mean"]),
        tuple(fields["std"]),
    )

"""Image files from clients: what is read of them, and what is refused."""

# numpy and Pillow are typed in part only.
# pyright: reportUnknownMemberType=false

import asyncio
import io
import json
import shutil
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pictures import DENSE, GEMMA, MISTRAL
from PIL import Image

from exo_node.placement.errors import InvalidCheckpoint, InvalidRequest
from exo_node.shard.text.helper_process import HelperLimits
from exo_node.shard.text.image_rows import PreparedImage, require_rows, with_image_rows
from exo_node.shard.text.messages import joined_contents
from exo_node.shard.text.pictures import (
    MAX_DECODED_PIXELS,
    PictureProcessor,
    header_of,
    image_of,
)
from exo_node.shard.text.plain_calls import without_tool_roles
from exo_node.shard.text.prompt_encoder import PromptEncoder
from exo_node.shard.text.template import fold_system_messages

SIZE = 96, 64


def no_token(_: str) -> None:
    """Of a tokenizer without tokens around images."""


@pytest.fixture(scope="module")
def processor() -> PictureProcessor:
    return PictureProcessor(DENSE, no_token)


def scene(mode: str = "RGB", size: tuple[int, int] = SIZE) -> Image.Image:
    image = Image.new("RGB", size, (10, 200, 30))
    image.paste((250, 20, 20), (0, 0, size[0] // 2, size[1] // 2))
    return image if mode == "RGB" else image.convert(mode)


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, depth: int, colour: int, raw: bytes) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(raw)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def sixteen_bits() -> bytes:
    rows = np.asarray(scene("L")).astype(">u2") * 257
    raw = b"".join(b"\0" + row.tobytes() for row in rows)
    return png(*SIZE, 16, 0, raw)


def transparent() -> Image.Image:
    image = scene().convert("RGBA")
    image.paste((9, 9, 9, 0), (0, 0, *SIZE))
    return image


def animated() -> bytes:
    frames = [Image.new("RGB", SIZE, (n * 60, 0, 0)) for n in range(4)]
    return saved(scene(), "GIF", save_all=True, append_images=frames)


SAME: dict[str, Callable[[], bytes]] = {
    "PNG": lambda: saved(scene()),
    "WebP without loss": lambda: saved(scene(), "WEBP", lossless=True),
    "BMP": lambda: saved(scene(), "BMP"),
    "a palette": lambda: saved(scene().quantize(2)),
    "RGBA, opaque": lambda: saved(scene("RGBA")),
    "an animation's first frame": animated,
    "turned by EXIF": lambda: turned(6),
    "mirrored by EXIF": lambda: turned(2),
}


def turned(orientation: int) -> bytes:
    """The scene, stored otherwise, with the note how to show it."""
    back = {6: Image.Transpose.ROTATE_90, 2: Image.Transpose.FLIP_LEFT_RIGHT}[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(scene().transpose(back), "PNG", exif=exif)


@pytest.mark.parametrize("name", SAME)
def test_the_same_picture_has_the_same_rows(processor: PictureProcessor, name: str) -> None:
    assert processor.prepare(SAME[name]()).ids == processor.prepare(saved(scene())).ids


def colours(image: PreparedImage) -> tuple[int, ...]:
    """The last patch's mean by colour."""
    patches = np.frombuffer(image.pixels, np.uint8).reshape(-1, 3, 2 * 16 * 16)
    return tuple(int(each) for each in patches[-1].mean(axis=1))


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (lambda: saved(scene("CMYK"), "JPEG", quality=100), (10, 200, 30)),
        (lambda: saved(scene("L")), (124, 124, 124)),
        (sixteen_bits, (124, 124, 124)),
        (lambda: saved(scene("1"), "PNG"), None),
        (lambda: saved(transparent()), (255, 255, 255)),
        (lambda: saved(scene("LA"), "PNG"), (124, 124, 124)),
    ],
)
def test_every_mode_becomes_rgb(
    processor: PictureProcessor, file: Callable[[], bytes], expected: tuple[int, ...] | None
) -> None:
    image = processor.prepare(file())
    assert image.rows == image.grid[1] * image.grid[2] // 4
    if expected is not None:
        assert max(abs(a - b) for a, b in zip(colours(image), expected, strict=True)) <= 6


def bomb() -> bytes:
    side = 20_000
    return png(side, side, 1, 0, bytes(side * (side // 8 + 1)))


REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "a bomb": (bomb, "million pixels"),
    "one over the limit": (
        lambda: png(MAX_DECODED_PIXELS + 1, 1, 1, 0, b""),
        "million pixels",
    ),
    "1 x 100,000": (lambda: saved(Image.new("1", (1, 100_000))), "cannot be scaled"),
    "a truncated PNG": (lambda: saved(scene())[:-40], "damaged or truncated"),
    "a truncated JPEG": (lambda: saved(scene(), "JPEG")[:-200], "damaged or truncated"),
    "a header alone": (lambda: saved(scene())[:40], "damaged or truncated|none of PNG"),
    "SVG": (lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>", "none of PNG"),
    "HTML": (lambda: b"<!doctype html>", "none of PNG"),
    "TIFF": (lambda: saved(scene(), "TIFF"), "none of PNG"),
    "an icon": (lambda: saved(scene(), "ICO"), "none of PNG"),
    "a PDF": (lambda: b"%PDF-1.7\n%%EOF", "none of PNG"),
    "PostScript": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "none of PNG"),
    "zeros": (lambda: bytes(1000), "none of PNG"),
    "an empty picture": (lambda: png(0, 9, 8, 2, b""), "damaged or truncated|none of PNG"),
    "a GIF without frames": (lambda: b"GIF89a\1\0\1\0\0\0\0;", "damaged|none of PNG"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_files_are_refused(processor: PictureProcessor, name: str) -> None:
    file, why = REFUSED[name]
    with pytest.raises(InvalidRequest, match=why):
        _ = processor.prepare(file())


def test_large_pictures_are_scaled_down(processor: PictureProcessor) -> None:
    image = processor.prepare(saved(scene(size=(3000, 2000))))
    assert image.grid[1] * image.grid[2] * 256 <= 65_536 and image.ids != [0]
    assert image_of(header_of(image), image.pixels) == image


def test_a_folder_without_settings_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpoint, match=r"config\.json describes no images"):
        _ = PictureProcessor(tmp_path, no_token)
    _ = shutil.copyfile(DENSE / "config.json", tmp_path / "config.json")
    with pytest.raises(InvalidCheckpoint, match=r"preprocessor_config\.json"):
        _ = PictureProcessor(tmp_path, no_token)
    (tmp_path / "preprocessor_config.json").write_text('{"size": {"shortest_edge": 0}}')
    with pytest.raises(InvalidCheckpoint, match="shortest_edge"):
        _ = PictureProcessor(tmp_path, no_token)


def test_settings_may_be_in_the_processors_file(tmp_path: Path) -> None:
    """As newer repositories have them."""
    ids = {"[IMG_BREAK]": 5, "[IMG_END]": 6, "[LINE]": 7}
    for name in ("config.json", "preprocessor_config.json"):
        _ = shutil.copyfile(MISTRAL / name, tmp_path / name)
    file = saved(scene())
    image = PictureProcessor(tmp_path, ids.get).prepare(file)
    assert image.line_ends == (5, 6) and image_of(header_of(image), image.pixels) == image
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").unlink()
    marks = {"image_processor": settings, "image_break_token": "[LINE]"}
    (tmp_path / "processor_config.json").write_text(json.dumps(marks))
    same = PictureProcessor(tmp_path, ids.get).prepare(file)
    assert same == replace(image, line_ends=(7, 6))
    with pytest.raises(InvalidCheckpoint, match=r"processor_config\.json names tokens"):
        _ = PictureProcessor(tmp_path, no_token)
    for size in ({"longest_edge": 10**6}, {"longest_edge": 1}, {"longest_edge": "x"}, {}):
        changed = {**marks, "image_processor": settings | {"size": size}}
        (tmp_path / "processor_config.json").write_text(json.dumps(changed))
        with pytest.raises(InvalidCheckpoint, match="longest_edge"):
            _ = PictureProcessor(tmp_path, ids.get)


def test_gemmas_settings_are_its_towers(tmp_path: Path) -> None:
    for name in ("config.json", "preprocessor_config.json"):
        _ = shutil.copyfile(GEMMA / name, tmp_path / name)
    image = PictureProcessor(tmp_path, no_token).prepare(saved(scene()))
    assert (image.rows, image.grid, len(image.pixels)) == (16, (1, 8, 8), 112 * 112 * 3)
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
    changed = settings | {"size": {"height": 224, "width": 112}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(changed))
    with pytest.raises(InvalidCheckpoint, match="another size"):
        _ = PictureProcessor(tmp_path, no_token)


def test_placeholders_become_rows() -> None:
    image = PreparedImage(3, (1, 2, 6), b"d", b"", (), ())
    other = PreparedImage(2, (1, 2, 4), b"e", b"", (), ())
    assert len({*image.ids, *other.ids}) == 5 and max(image.ids) < 0
    prompt = with_image_rows([5, 9, 6, 9], 9, [image, other])
    assert prompt == [5, *image.ids, 6, *other.ids]
    require_rows(prompt, [image, other])
    for wrong in ([other, image], [image], []):
        with pytest.raises(InvalidRequest, match="rows of images"):
            require_rows(prompt, wrong)
    with pytest.raises(InvalidRequest, match="places for 0 of 1 images"):
        _ = with_image_rows([5, 6], 9, [image])


def test_the_helper_decodes_within_limits(processor: PictureProcessor) -> None:
    async def run() -> None:
        prompts = PromptEncoder(HelperLimits(image_cpu_s=0.4))
        prompts.open(DENSE)
        try:
            file = saved(scene())
            assert (await prompts.image(file, "f")) == processor.prepare(file)
            noise = np.random.default_rng(0).integers(0, 256, (5000, 6000, 3), np.uint8)
            with pytest.raises(InvalidRequest, match="more time or memory") as refused:
                _ = await prompts.image(saved(Image.fromarray(noise), compress_level=0), "f")
            assert refused.value.param == "f"
            with pytest.raises(InvalidRequest, match="none of PNG") as refused:
                _ = await prompts.image(b"x", "images[0]")
            assert refused.value.param == "images[0]"
        finally:
            await prompts.close()

    asyncio.run(run())


IMAGE_PART = {"type": "image"}


def test_contents_with_images_are_joined_as_parts() -> None:
    assert joined_contents("-", "a", None, "", "b") == "a-b"
    between = {"type": "text", "text": "-"}
    assert joined_contents("-", "a", [IMAGE_PART], "b") == [
        {"type": "text", "text": "a"},
        between,
        IMAGE_PART,
        between,
        {"type": "text", "text": "b"},
    ]
    asked: list[Any] = [
        {"role": "user", "content": [IMAGE_PART]},
        {"role": "system", "content": "Be brief."},
    ]
    (folded,) = fold_system_messages(asked)
    assert folded["content"][0] == IMAGE_PART and folded["content"][-1]["text"] == "Be brief."
    results: list[Any] = [
        {"role": "tool", "content": "it"},
        {"role": "user", "content": [IMAGE_PART]},
    ]
    (one,) = without_tool_roles(results)
    assert one["content"][-1] == IMAGE_PART and one["content"][0]["text"] == "Result:\nit"

"""Image files that clients may send: what each must be read as, or why it is refused."""

import gzip
import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from exo_node.shard.text.pictures import MAX_DECODED_PIXELS

SIZE = 96, 64
SIGNATURE = b"\x89PNG\r\n\x1a\n"
HEAD = 33
"""Bytes of a PNG in front of its second chunk."""

File = Callable[[], bytes]


def scene(mode: str = "RGB", size: tuple[int, int] = SIZE) -> Image.Image:
    """Three colours, so that no turn of it is the same."""
    image = Image.new("RGB", size, (10, 200, 30))
    image.paste((250, 20, 20), (0, 0, size[0] // 2, size[1] // 2))
    image.paste((20, 30, 240), (0, size[1] // 2, size[0] // 2, size[1]))
    return image if mode == "RGB" else image.convert(mode)


def rough(size: tuple[int, int] = (960, 640)) -> Image.Image:
    """A scene that compresses badly, so that a part of its file is a part of its rows."""
    return scene(size=size).effect_spread(9)


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def jpeg(**options: Any) -> bytes:
    return saved(scene(), "JPEG", quality=90, **options)


def decoded(file: bytes) -> Image.Image:
    return Image.open(io.BytesIO(file)).convert("RGB")


def dot(*colour: int) -> Image.Image:
    image = Image.new("RGB", (1, 1))
    image.putpixel((0, 0), colour)
    return image


def grey(mode: str = "L") -> Image.Image:
    return scene(mode).convert("RGB")


# Parts of files


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, depth: int, colour: int, raw: bytes) -> bytes:
    return packed_png(width, height, depth, colour, zlib.compress(raw))


def packed_png(width: int, height: int, depth: int, colour: int, data: bytes) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return SIGNATURE + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def with_chunk(kind: bytes, data: bytes, count: int = 1) -> bytes:
    """The scene with a chunk after its head."""
    file = saved(scene())
    return file[:HEAD] + chunk(kind, data) * count + file[HEAD:]


def bomb() -> bytes:
    side = 20_000
    return png(side, side, 1, 0, bytes(side * (side // 8 + 1)))


def text_bomb() -> bytes:
    return zlib.compress(bytes(64 << 20), 9)


def sixteen_bits(mode: str) -> bytes:
    rows = np.asarray(scene(mode)).astype(">u2") * 257
    raw = b"".join(b"\0" + row.tobytes() for row in rows)
    return png(*SIZE, 16, 0 if mode == "L" else 2, raw)


def cgbi() -> bytes:
    """As Xcode packs files into apps: other colours first, and no zlib around the rows."""
    rows = np.asarray(scene("RGBA"))[..., [2, 1, 0, 3]]
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    data = packer.compress(b"".join(b"\0" + row.tobytes() for row in rows)) + packer.flush()
    head = chunk(b"CgBI", b"\x50\0\x20\x02") + chunk(
        b"IHDR", struct.pack(">IIBBBBB", *SIZE, 8, 6, 0, 0, 0)
    )
    return SIGNATURE + head + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def webp(kind: bytes, body: bytes) -> bytes:
    parts = b"WEBP" + kind + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", len(parts)) + parts


def webp_canvas(side: int) -> bytes:
    edge = struct.pack("<I", side - 1)[:3]
    return webp(b"VP8X", bytes(4) + edge + edge)


def webp_head(width: int, height: int) -> bytes:
    """A file without loss whose rows are missing."""
    return webp(b"VP8L", b"\x2f" + struct.pack("<I", width - 1 | height - 1 << 14) + bytes(19))


def frame(width: int, height: int) -> bytes:
    size = struct.pack("<HHHHB", 0, 0, width, height, 0)
    return b"\x21\xf9\x04\x04\x01\0\0\0\x2c" + size + b"\x02\x02\x44\x01\0"


def gif(width: int, height: int, *frames: bytes) -> bytes:
    colours = bytes([10, 200, 30, 250, 20, 20])
    return (
        b"GIF89a"
        + struct.pack("<HH", width, height)
        + b"\x80\0\0"
        + colours
        + b"".join([*frames, b";"])
    )


def icon() -> bytes:
    inner = bomb()
    entry = struct.pack("<HHHBBBBHHII", 0, 1, 1, 0, 0, 0, 0, 1, 32, len(inner), 22)
    return entry + inner


def apples_icon() -> bytes:
    inner = bomb()
    entry = b"ic10" + struct.pack(">I", len(inner) + 8) + inner
    return b"icns" + struct.pack(">I", len(entry) + 8) + entry


def jpeg_of(width: int, height: int) -> bytes:
    """The scene's data with another size in its head."""
    before = b"\xff\xc0\x00\x11\x08"
    own, other = (before + struct.pack(">HH", *each) for each in (SIZE[::-1], (height, width)))
    file = jpeg()
    assert own in file
    return file.replace(own, other)


def many_scans(count: int = 5000) -> bytes:
    """A small file that would take half a minute: its last scan `count` times."""
    file = saved(Image.new("RGB", (4000, 4000)), "JPEG", progressive=True)
    last = file.rindex(b"\xff\xda")
    return file[:last] + file[last:-2] * count + file[-2:]


def animated(kind: str, **options: Any) -> bytes:
    frames = [Image.new("RGB", SIZE, (n * 60, 0, 0)) for n in range(4)]
    return saved(scene(), kind, save_all=True, append_images=frames, **options)


def cut(kind: str, part: float) -> File:
    def file() -> bytes:
        whole = saved(rough(), kind)
        return whole[: int(len(whole) * part)]

    return file


# EXIF


DISPLAYED: dict[int, Callable[[Any], Any]] = {
    1: lambda rows: rows,
    2: lambda rows: rows[:, ::-1],
    3: lambda rows: rows[::-1, ::-1],
    4: lambda rows: rows[::-1],
    5: lambda rows: rows.swapaxes(0, 1),
    6: lambda rows: np.rot90(rows, -1),
    7: lambda rows: rows[::-1, ::-1].swapaxes(0, 1),
    8: lambda rows: np.rot90(rows),
}
"""How stored rows are shown, by EXIF's orientation (EXIF 2.32, table 6)."""


def noted(kind: str, orientation: int, size: tuple[int, int] = SIZE, **options: Any) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(scene(size=size), kind, exif=exif, **options)


def rotated(orientation: int, file: bytes) -> Image.Image:
    return Image.fromarray(DISPLAYED[orientation](np.asarray(decoded(file))).copy())


# Colours


def clear() -> Image.Image:
    """Half of it invisible."""
    image = scene("RGBA")
    image.paste((9, 9, 9, 0), (0, 0, SIZE[0] // 2, SIZE[1]))
    return image


def half_white() -> Image.Image:
    image = scene()
    image.paste((255, 255, 255), (0, 0, SIZE[0] // 2, SIZE[1]))
    return image


def grey_clear() -> Image.Image:
    return Image.merge("LA", [scene("L"), clear().getchannel("A")])


def grey_half_white() -> Image.Image:
    image = grey()
    image.paste((255, 255, 255), (0, 0, SIZE[0] // 2, SIZE[1]))
    return image


def palette_clear(kind: str) -> bytes:
    image = half_white().quantize(4)
    return saved(image, kind, transparency=image.getpixel((0, 0)))


READ: dict[str, tuple[File, Callable[[], Image.Image]]] = {
    "PNG": (lambda: saved(scene()), scene),
    "WebP without loss": (lambda: saved(scene(), "WEBP", lossless=True), scene),
    "BMP": (lambda: saved(scene(), "BMP"), scene),
    "CMYK": (lambda: saved(scene("CMYK"), "JPEG"), lambda: decoded(saved(scene("CMYK"), "JPEG"))),
    "JPEG in grey": (lambda: saved(grey("L"), "JPEG"), lambda: decoded(saved(grey("L"), "JPEG"))),
    "progressive JPEG": (lambda: jpeg(progressive=True), lambda: decoded(jpeg())),
    "JPEG with more behind it": (lambda: jpeg() + b"garbage" * 999, lambda: decoded(jpeg())),
    "JPEG and PNG": (lambda: jpeg() + saved(grey()), lambda: decoded(jpeg())),
    "a photo and its small copy": (
        lambda: saved(scene(), "MPO", quality=90, save_all=True, append_images=[grey()]),
        lambda: decoded(jpeg()),
    ),
    "a palette": (lambda: saved(scene().quantize(4)), scene),
    "a palette with transparency": (lambda: palette_clear("PNG"), half_white),
    "GIF with transparency": (lambda: palette_clear("GIF"), half_white),
    "RGBA, opaque": (lambda: saved(scene("RGBA")), scene),
    "RGBA": (lambda: saved(clear()), half_white),
    "LA": (lambda: saved(grey_clear()), grey_half_white),
    "L": (lambda: saved(scene("L")), grey),
    "1 bit": (lambda: saved(scene("1")), lambda: grey("1")),
    "16 bits, grey": (lambda: sixteen_bits("L"), grey),
    "16 bits, RGB": (lambda: sixteen_bits("RGB"), scene),
    "animated GIF": (lambda: animated("GIF"), scene),
    "animated PNG": (lambda: animated("PNG"), scene),
    "animated PNG with a still": (lambda: animated("PNG", default_image=True), scene),
    "animated WebP": (lambda: animated("WEBP", lossless=True), scene),
    "GIF of 20,000 frames": (lambda: gif(1, 1, frame(1, 1) * 20_000), lambda: dot(10, 200, 30)),
    "GIF with a huge second frame": (
        lambda: gif(1, 1, frame(1, 1), frame(65_535, 65_535)),
        lambda: dot(10, 200, 30),
    ),
    "1 x 1": (lambda: saved(dot(7, 7, 7), "BMP"), lambda: dot(7, 7, 7)),
    "3 x 3": (lambda: saved(scene(size=(3, 3)), "BMP"), lambda: scene(size=(3, 3))),
    "chunks that nobody knows": (lambda: with_chunk(b"ABCD", b"1" * 99), scene),
    "text of 5 MB": (lambda: with_chunk(b"tEXt", b"prompt\0" + b"x" * (5 << 20)), scene),
    "PNG and script": (lambda: with_chunk(b"tEXt", b"c\0<script>alert(1)</script>"), scene),
    "PNG and archive": (lambda: saved(scene()) + b"PK\3\4" * 99, scene),
    "no such orientation": (lambda: noted("PNG", 99), scene),
    **{
        f"orientation {n} of {kind}": (
            lambda n=n, kind=kind: noted(kind, n, lossless=True),
            lambda n=n, kind=kind: rotated(n, saved(scene(), kind, lossless=True)),
        )
        for n in DISPLAYED
        for kind in ("PNG", "JPEG", "WEBP")
    },
}
"""Files, and pixels that have the same rows. Lossless ones are the scene."""

LARGE, NONE, DAMAGED = "million pixels; scale it down", "none of PNG", "truncated .*send it again"
HEADERS = "metadata are damaged or too large .*save it again without metadata"
REFUSED: dict[str, tuple[File, str]] = {
    "a bomb": (bomb, LARGE),
    "one over the limit": (lambda: png(MAX_DECODED_PIXELS + 1, 1, 1, 0, b""), LARGE),
    "a size beyond all": (lambda: png(2**31 - 1, 2**31 - 1, 8, 2, b""), LARGE),
    "a WebP bomb": (lambda: webp_canvas(1 << 24), LARGE),
    "a WebP bomb without loss": (lambda: webp_head(16_384, 16_384), LARGE),
    "a WebP of 48 million pixels": (lambda: webp_head(8064, 6048), "JPEG"),
    "a GIF bomb": (lambda: gif(65_535, 65_535, frame(1, 1)), LARGE),
    "a JPEG bomb": (lambda: jpeg_of(65_500, 65_500), LARGE),
    "a TIFF bomb": (
        lambda: saved(Image.new("1", (10_000, 10_000)), "TIFF", compression="group4"),
        NONE,
    ),
    "an icon with a bomb": (icon, NONE),
    "Apple's icon with a bomb": (apples_icon, NONE),
    "a bomb in zTXt": (lambda: with_chunk(b"zTXt", b"k\0\0" + text_bomb()), HEADERS),
    "a bomb in iTXt": (lambda: with_chunk(b"iTXt", b"k\0\1\0\0\0" + text_bomb()), HEADERS),
    "a bomb in iCCP": (lambda: with_chunk(b"iCCP", b"k\0\0" + text_bomb()), HEADERS),
    "many small bombs": (
        lambda: with_chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(1 << 20), 9), 100),
        HEADERS,
    ),
    "damaged EXIF": (lambda: with_chunk(b"eXIf", b"garbage!" * 9), HEADERS),
    "many scans": (many_scans, "more than 67 scans.*baseline JPEG"),
    "1 x 100,000": (lambda: saved(Image.new("1", (1, 100_000))), "cannot be scaled .*crop it"),
    "100,000 x 1": (lambda: saved(Image.new("RGB", (100_000, 1))), "cannot be scaled .*crop it"),
    "as wide as the limit": (lambda: png(MAX_DECODED_PIXELS, 1, 1, 0, b""), "cannot be scaled"),
    **{
        f"{part:.0%} of a {kind}": (cut(kind, part), DAMAGED)
        for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP")
        for part in (0.05, 0.5, 0.95, 0.99)
    },
    "a header alone": (lambda: saved(scene())[:40], f"{DAMAGED}|{NONE}"),
    "an empty picture": (lambda: png(0, 9, 8, 2, b""), f"{DAMAGED}|{NONE}"),
    "a GIF without frames": (lambda: gif(1, 1), f"{DAMAGED}|{NONE}"),
    "rows that do not decompress": (lambda: packed_png(*SIZE, 8, 2, b"rows" * 99), DAMAGED),
    "CgBI": (cgbi, DAMAGED),
    "SVG": (lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>", NONE),
    "packed SVG": (lambda: gzip.compress(b"<svg/>"), NONE),
    "text": (lambda: b"a cat", NONE),
    "HTML": (lambda: b"<!doctype html>", NONE),
    "PDF": (lambda: b"%PDF-1.7\n%%EOF", NONE),
    "PDF and PNG": (lambda: b"%PDF-1.7\n" + saved(scene()), NONE),
    "PostScript": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", NONE),
    "TIFF": (lambda: saved(scene(), "TIFF"), NONE),
    "an icon": (lambda: saved(scene(), "ICO"), NONE),
    "HEIC": (lambda: b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(99), NONE),
    "zeros": (lambda: bytes(1000), NONE),
}
"""Files, and the words of their refusal."""

"""Image files from clients: what is read of them, and what is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from image_files import (
    DISPLAYED,
    READ,
    REFUSED,
    grey,
    half_white,
    rotated,
    rough,
    saved,
    scene,
)
from pictures import DENSE, GEMMA, MISTRAL
from PIL import Image

from exo_node.placement.errors import InvalidCheckpoint, InvalidRequest
from exo_node.shard.text.image_rows import PreparedImage, require_rows, with_image_rows
from exo_node.shard.text.messages import joined_contents
from exo_node.shard.text.pictures import PictureProcessor, header_of, image_of
from exo_node.shard.text.plain_calls import without_tool_roles
from exo_node.shard.text.rewritings import fold_system_messages


def no_token(_: str) -> None:
    """Of a tokenizer without tokens around images."""


@pytest.fixture(scope="module")
def processor() -> PictureProcessor:
    return PictureProcessor(DENSE, no_token)


@pytest.mark.parametrize("name", READ)
def test_the_same_picture_has_the_same_rows(processor: PictureProcessor, name: str) -> None:
    file, pixels = READ[name]
    image = processor.prepare(file())
    assert image.ids == processor.prepare(saved(pixels())).ids
    assert image.rows == image.grid[1] * image.grid[2] // 4


def test_other_pictures_have_other_rows(processor: PictureProcessor) -> None:
    """Or the test above would say nothing."""
    shapes = {rotated(n, saved(scene())).tobytes(): None for n in DISPLAYED}
    assert len(shapes) == len(DISPLAYED)
    others = [scene(), half_white(), grey(), grey("1"), rotated(2, saved(scene()))]
    assert len({processor.prepare(saved(each)).digest for each in others}) == len(others)


@pytest.mark.parametrize("name", REFUSED)
def test_other_files_are_refused(processor: PictureProcessor, name: str) -> None:
    file, why = REFUSED[name]
    with pytest.raises(InvalidRequest, match=why):
        _ = processor.prepare(file())


@pytest.mark.parametrize("size", [(1700, 1900), (3, 3), (200, 3)])
def test_rows_are_what_the_processor_makes_of_all_pixels(
    processor: PictureProcessor, size: tuple[int, int]
) -> None:
    image = rough(size)
    own: Any = processor._cutter.processor  # pyright: ignore[reportPrivateUsage]
    patches = own(image, do_rescale=False, do_normalize=False, return_tensors="np")["pixel_values"]
    for mode in ("RGB", "RGBA"):
        prepared = processor.prepare(saved(image.convert(mode), compress_level=1))
        assert prepared.pixels == patches.round().astype("uint8").tobytes()


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


def test_an_image_of_no_lines_is_refused() -> None:
    thin = saved(Image.new("1", (1, 1000)))
    with pytest.raises(InvalidRequest, match="1 x 1000 cannot be scaled"):
        _ = PictureProcessor(MISTRAL, {"[IMG_BREAK]": 5, "[IMG_END]": 6}.get).prepare(thin)


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
    turns: list[Any] = [
        {"role": "user", "content": [IMAGE_PART]},
        {"role": "system", "content": "Be brief."},
    ]
    (folded,) = fold_system_messages(turns)
    assert folded["content"][0] == IMAGE_PART and folded["content"][-1]["text"] == "Be brief."
    results: list[Any] = [
        {"role": "tool", "content": "it"},
        {"role": "user", "content": [IMAGE_PART]},
    ]
    (one,) = without_tool_roles(results)
    assert one["content"][-1] == IMAGE_PART and one["content"][0]["text"] == "Result:\nit"

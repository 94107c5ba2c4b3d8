"""A JPEG's scans are counted by its markers alone, and too many are refused."""

import pytest
from image_files import jpeg, many_scans, saved, scene

from exo_node.placement.errors import InvalidRequest
from exo_node.shard.text.pictures import MAX_SCANNED_PIXELS, MAX_SCANS, require_few_scans

SCAN = b"\xff\xda"
REFUSAL = f"more than {MAX_SCANS} scans.*baseline JPEG"


def progressive() -> bytes:
    return saved(scene(size=(64, 64)), "JPEG", progressive=True)


def of_scans(count: int) -> bytes:
    """A JPEG whose last scan is repeated until it has `count`."""
    file = progressive()
    last, own = file.rindex(SCAN), file.count(SCAN)
    return file[:-2] + file[last:-2] * (count - own) + file[-2:]


@pytest.mark.parametrize("file", [jpeg(), progressive(), of_scans(MAX_SCANS), b"", b"\xff\xd8"])
def test_usual_files_are_accepted(file: bytes) -> None:
    require_few_scans(file, 64 * 64)


@pytest.mark.parametrize("file", [of_scans(MAX_SCANS + 1), many_scans()])
def test_one_scan_more_is_refused(file: bytes) -> None:
    with pytest.raises(InvalidRequest, match=REFUSAL):
        require_few_scans(file, 64 * 64)


def test_the_larger_an_image_the_fewer_scans_it_may_have() -> None:
    require_few_scans(of_scans(16), MAX_SCANNED_PIXELS // 16)
    with pytest.raises(InvalidRequest, match="more than 16 scans"):
        require_few_scans(of_scans(17), MAX_SCANNED_PIXELS // 16)


def test_scans_after_the_end_and_within_metadata_do_not_count() -> None:
    """As in the preview of a camera, and in the film behind a telephone's moving photo."""
    file = progressive()
    film = b"\x00\x02" + (SCAN + b"\x00\x02") * 200
    comment = b"\xff\xfe" + (2 + 400).to_bytes(2) + SCAN * 200
    require_few_scans(file[:2] + comment + file[2:] + film, 64 * 64)


@pytest.mark.parametrize("filler", [b"\xff\xc8\x00\x02", b"\xff\xe0\x00\x00", b"\xff\xfe\x00\x02"])
def test_a_file_of_markers_alone_is_refused_before_they_are_all_read(filler: bytes) -> None:
    with pytest.raises(InvalidRequest, match=REFUSAL):
        require_few_scans(b"\xff\xd8" + filler * 1_000_000, 64 * 64)


def test_a_scan_that_claims_any_length_is_counted_once() -> None:
    file = progressive().replace(SCAN, SCAN + b"\xff")
    require_few_scans(file, 64 * 64)

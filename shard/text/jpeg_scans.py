"""Counts the scans of a JPEG without decoding them: a decoder passes over all pixels for each.

Layout: ITU-T T.81, annex B.
"""

import re
from typing import Final

from ...placement.errors import InvalidRequest

MAX_SCANS: Final = 100
"""Encoders write 10 scans, or some dozens where they try to save bytes."""
MAX_SCANNED_PIXELS: Final = 1 << 30
"""Scans times pixels: 16 scans of the largest image."""
_MAX_MARKERS: Final = 10_000
_START: Final = b"\xff\xd8"
_SCAN: Final = 0xDA
_END: Final = 0xD9
_MARKER: Final = re.compile(rb"\xff[^\x00\x01\xff\xd0-\xd8]")
"""The next marker that has a segment, or ends the image: others are within a scan's data."""


def require_few_scans(data: bytes, pixels: int) -> None:
    """Refuses a JPEG of more scans than its `pixels` may have. Raises InvalidRequest."""
    most = min(MAX_SCANS, MAX_SCANNED_PIXELS // max(1, pixels))
    if data.startswith(_START) and _has_more_scans(data, most):
        raise InvalidRequest(
            f"the JPEG has more than {most} scans, which take long to decode; save it again as a "
            "baseline JPEG, or as PNG"
        )


def _has_more_scans(data: bytes, most: int) -> bool:
    """Stops after `most`. A file of more markers than any photo counts as one of more scans."""
    position, scans = len(_START), 0
    for _ in range(_MAX_MARKERS):
        marker = _MARKER.search(data, position)
        if marker is None or data[marker.end() - 1] == _END:
            return False
        scans += data[marker.end() - 1] == _SCAN
        if scans > most:
            return True
        position = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2])
    return True

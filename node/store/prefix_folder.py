"""The bound of the cached prefixes on this disk."""

import shutil
from pathlib import Path
from typing import Final

from ...shard.checkpoint.prefix_files import files_below

FREE_SHARE: Final = 10
"""The default bound is the free space, divided by this."""
MAX_DEFAULT_BYTES: Final = 20 * 10**9


def prefix_root(data_dir: Path) -> Path:
    """The folder of all prefixes of a node."""
    return data_dir / "prefixes"


def disk_bound(root: Path, gigabytes: float | None) -> int:
    """Bytes that all files below `root` may have. `gigabytes`: the setting."""
    if gigabytes is not None:
        return int(gigabytes * 10**9)
    own = sum(each.bytes for each in files_below(root))
    return min(MAX_DEFAULT_BYTES, (shutil.disk_usage(root.parent).free + own) // FREE_SHARE)

"""Imports mlx-lm where few files may be open: it insists on a hard limit of 4096.

`mlx_lm.utils` sets that limit when it is imported. A process may lower its hard limit and not raise
it, so where it is below 4096 already the import fails, and with it every load. To be imported
before anything else that imports mlx-lm.
"""

import resource


def _keeps_what_there_is(which: int, limits: tuple[int, int]) -> None:
    """Raises the soft limit as far as the hard one allows, and lowers neither."""
    soft, hard = resource.getrlimit(which)
    wanted = limits[0] if hard == resource.RLIM_INFINITY else min(limits[0], hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        _SET(which, (wanted, hard))


_SET = resource.setrlimit
resource.setrlimit = _keeps_what_there_is
try:
    import mlx_lm.utils  # noqa: F401  # pyright: ignore[reportUnusedImport]
finally:
    resource.setrlimit = _SET

"""Brings a model from the Hugging Face hub into its ordinary cache; only what the engine reads.

The hub's client takes a third of a second of a CPU to import: the first download does.
"""

from collections.abc import Callable
from pathlib import Path

from huggingface_hub import constants

from ...placement.errors import DownloadFailed
from .checkpoint import HEAD_FILES
from .hub_cache import cache_folder, check_names, closed_part, missing_files, snapshot_of
from .progress import Choose, Progress

__all__ = ["Progress", "download", "offline_by"]


def download(
    repository: str,
    revision: str | None,
    on_progress: Callable[[Progress], None],
    *,
    offline: bool,
    endpoint: str | None = None,
    cache_dir: Path | None = None,
    choose: Choose | None = None,
) -> Path:
    """Bring a model into the cache and return its snapshot; blocks, and raises DownloadFailed.

    What an earlier call left unfinished is continued. `on_progress` is called from several threads,
    one at a time, and never with fewer bytes than before; what it raises ends the download and
    reaches the caller. `choose` names the weight files that are wanted, None: all. `endpoint` None
    is the hub, or the mirror that HF_ENDPOINT names.
    """
    check_names(repository, revision)
    cache = cache_folder(cache_dir)
    if fault := closed_part(repository, cache):
        raise DownloadFailed(fault, param="model")
    if variable := offline_by(offline):
        return _from_cache_only(repository, revision, cache, variable)
    from .hub_download import fetch_model

    return fetch_model(
        repository, revision, on_progress, endpoint=endpoint, cache=cache, choose=choose
    )


def offline_by(offline: bool) -> str:
    """The setting that forbids to ask the hub; "" where none does."""
    if offline:
        return "EXO_OFFLINE"
    return "HF_HUB_OFFLINE" if constants.is_offline_mode() else ""


def _from_cache_only(repository: str, revision: str | None, cache: Path, variable: str) -> Path:
    """Where only a head's own file is missing the rest is served, with MTP off."""
    snapshot = snapshot_of(repository, revision, cache)
    missing = missing_files(repository, snapshot, cache) if snapshot else ["config.json"]
    if snapshot is not None and set(missing) <= set(HEAD_FILES):
        return snapshot
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    raise DownloadFailed(
        f"{repository} is not complete in {cache} (missing: {', '.join(missing[:3])}{more}) and "
        f"this node is offline. Unset {variable}, or copy the model into --models-dir.",
        param=variable,
    )

"""Searches the Hugging Face hub for models, with what planning needs of each: size and config.json.

Nothing is written to this disk. Importing the hub's client takes a third of a second of a CPU, so
this module is imported by the first search.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx2
from huggingface_hub import HfApi, ModelInfo, hf_hub_url
from huggingface_hub.utils import (
    build_hf_headers,  # pyright: ignore[reportUnknownVariableType]
    get_session,
    hf_raise_for_status,
)

from ...placement.errors import DownloadFailed, ExoNodeError, InvalidCheckpoint
from ...shard.checkpoint.checkpoint import MAX_CONFIG_BYTES, is_weight_file, parse_config
from ...shard.checkpoint.model_classes import has_class
from .hub_client import answers_of_the_hub, explain
from .hub_download import list_files
from .identifiers import Commit, RepositoryName
from .model_folder import CONFIG

_TIMEOUT_S: Final = 15.0
_STREAMS: Final = 6
_KEPT: Final = 512
_FACTS: Final = ("sha", "gated", "downloads", "likes", "lastModified")


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of one commit of a repository; `fault`: why exo-node cannot use it."""

    download_bytes: int = 0
    weight_bytes: int = 0
    config: Mapping[str, Any] | None = None
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Hit:
    """A repository that the hub found. `updated`: the time of its last commit, ISO 8601."""

    repository: str
    contents: Contents
    downloads: int
    likes: int
    gated: bool
    updated: str | None


class HubSearch:
    """Keeps the contents of commits that it saw; `endpoint` None: the hub, or HF_ENDPOINT's."""

    def __init__(self, endpoint: str | None = None) -> None:
        self._endpoint = endpoint
        self._cache: dict[tuple[RepositoryName, Commit], Contents] = {}

    def find(self, query: str, limit: int) -> list[Hit]:
        """Repositories with safetensors, the most downloaded first. Blocks.

        Raises DownloadFailed where the hub does not answer.
        """
        hub = HfApi(endpoint=self._endpoint, library_name="exo-node")
        try:
            with answers_of_the_hub("a search"):
                models: list[ModelInfo] = list(
                    hub.list_models(
                        search=query,
                        filter="safetensors",
                        sort="downloads",
                        limit=limit,
                        expand=[*_FACTS],
                    )
                )
        except (httpx2.HTTPError, OSError) as error:
            raise DownloadFailed(
                f"the hub could not be searched ({error}). Check the network and HF_ENDPOINT, and "
                "search again.",
                param="HF_ENDPOINT",
            ) from error
        models = [model for model in models if RepositoryName.read(model.id)]
        with ThreadPoolExecutor(_STREAMS, thread_name_prefix="search") as pool:
            contents = list(pool.map(self._contents, [hub] * len(models), models))
        return [_hit(model, each) for model, each in zip(models, contents, strict=True)]

    def _contents(self, hub: HfApi, model: ModelInfo) -> Contents:
        """The contents of the newest commit; those of a commit never change."""
        commit = Commit.read(model.sha)
        if commit is None:
            return Contents(fault=f"the hub names no commit of it ({str(model.sha)[:80]!r})")
        key = (RepositoryName(model.id), commit)
        if (contents := self._cache.get(key)) is not None:
            return contents
        try:
            contents = self._read(hub, *key)
        except ExoNodeError as fault:
            contents = Contents(fault=fault.message)
        except (httpx2.HTTPError, OSError) as error:  # this may be otherwise at the next search
            return Contents(fault=explain(error, model.id, model.sha))
        if len(self._cache) >= _KEPT:
            self._cache.clear()
        self._cache[key] = contents
        return contents

    def _read(self, hub: HfApi, repository: RepositoryName, commit: Commit) -> Contents:
        files = list_files(hub, repository, commit)
        config = parse_config(Path(repository) / CONFIG, self._config(repository, commit))
        has_model_class = has_class(config)
        fault = f"mlx-lm has no class for its model_type {str(config.get('model_type'))[:80]!r}"
        return Contents(
            download_bytes=sum(file.size for file in files),
            weight_bytes=sum(file.size for file in files if is_weight_file(file.path)),
            config=config if has_model_class else None,
            fault="" if has_model_class else fault,
        )

    def _config(self, repository: RepositoryName, commit: Commit) -> bytes:
        """config.json, at most MAX_CONFIG_BYTES. Raises InvalidCheckpoint beyond."""
        url = hf_hub_url(repository, CONFIG, revision=commit, endpoint=self._endpoint)
        headers = build_hf_headers(library_name="exo-node")
        raw = bytearray()
        with get_session().stream(
            "GET", url, headers=headers, follow_redirects=True, timeout=_TIMEOUT_S
        ) as response:
            hf_raise_for_status(response)
            for chunk in response.iter_bytes():
                raw += chunk
                if len(raw) > MAX_CONFIG_BYTES:
                    raise InvalidCheckpoint(f"its {CONFIG} has over {MAX_CONFIG_BYTES} bytes")
        return bytes(raw)


def _hit(model: ModelInfo, contents: Contents) -> Hit:
    updated = model.last_modified.isoformat() if model.last_modified else None
    return Hit(
        model.id, contents, model.downloads or 0, model.likes or 0, bool(model.gated), updated
    )

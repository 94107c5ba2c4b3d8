"""The hub's client: lists of repositories and files, bounded in bytes, pages and seconds. Blocks.

It goes through the proxies of the environment, as nothing else in exo-node does. The hub's own
client reads an answer however long it is, for as long as it takes, and asks six times where a name
is not found. So it is asked for tokens and errors only.
"""

import json
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl, quote, urlsplit

import httpx2
from huggingface_hub import constants
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import (
    build_hf_headers,  # pyright: ignore[reportUnknownVariableType]
    hf_raise_for_status,
)
from pydantic import TypeAdapter

from ...placement.errors import DownloadFailed
from ...shard.checkpoint.checkpoint import HEAD_FILES, is_weight_file
from ..machine.json_size import fits
from ..machine.setting_sources import environment
from .identifiers import Commit, FileHash, FilePath, RepositoryName, Revision, Sha256
from .model_folder import is_model_file
from .stop_signal import StopSignal
from .transfers import RemoteFile

T = TypeVar("T")
Entry = Mapping[str, Any]
"""A repository or a file, as the hub describes it: each field is checked where it is read."""
_Query = Sequence[tuple[str, str]]

_PROXIES: Final = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_FILES: Final = ("SSL_CERT_FILE", "SSL_CERT_DIR", "SSLKEYLOGFILE")
_LIST_S: Final = 60.0
"""The pages of one list together."""
_PAGE_BYTES: Final = 16 << 20
"""Limit of one answer; the hub sends a thousand files in half a megabyte."""
_MOST_PAGES: Final = 200
_MOST_ENTRIES: Final = 100_000
_MOST_FILES: Final = 2_000
"""Limit of one repository; the largest models have some hundred files."""
_FACTS: Final = ("sha", "gated", "downloads", "likes", "lastModified")

_OBJECT: Final = TypeAdapter(dict[str, Any])
_LIST: Final = TypeAdapter(list[Entry])


def hub_client(**options: Any) -> httpx2.Client:
    """The hub's client goes through the proxies of the environment. Raises DownloadFailed."""
    try:
        return httpx2.Client(follow_redirects=True, **options)
    except (ImportError, OSError, ValueError, httpx2.InvalidURL) as error:
        environ = environment()
        names = [name for name in environ if name.upper() in _PROXIES]
        why = "it is malformed"
        if isinstance(error, OSError):
            names = [n for n in _FILES if n in environ and not os.path.exists(environ[n])]
            why = "there is no such file"
        elif isinstance(error, ImportError):
            why = "SOCKS is not supported"
        raise DownloadFailed(
            f"{' or '.join(sorted(names))} cannot be used: {why}. Write a proxy as "
            "http://HOST:PORT, or unset the variable.",
            param=sorted(names)[0] if names else None,
        ) from error


def wrong_answer(about: str, fault: str) -> DownloadFailed:
    return DownloadFailed(
        f"the hub's answer about {about} has the wrong form ({fault}). Check that HF_ENDPOINT, or "
        "a proxy between here and there, leads to a Hugging Face hub.",
        param="HF_ENDPOINT",
    )


def explain(error: Exception, repository: str, revision: str | None) -> str:
    """The fault between here and the hub, and its remedy."""
    match error:
        case GatedRepoError():
            return (
                f"{repository} is gated. Accept its terms on its page at the hub, then log in with "
                "`hf auth login` or set HF_TOKEN."
            )
        case RepositoryNotFoundError():
            return (
                f"the hub has no model repository {repository}, or it is private. Check the name; "
                "for a private one log in with `hf auth login` or set HF_TOKEN."
            )
        case RevisionNotFoundError():
            return f"{repository} has no revision {revision or 'main'}. Check it on the hub."
        case DisabledRepoError():
            return f"the hub has disabled {repository}. Choose another repository."
        case HfHubHTTPError():
            status = error.response.status_code
            return f"the hub answered {status} for {repository}. Try again later."
        case httpx2.HTTPError():
            return (
                f"the hub could not be reached for {repository} ({error.__cause__ or error}). "
                "Check the network, HF_ENDPOINT and the proxy's variables, and start the download "
                "again; it resumes where it stopped."
            )
        case _:
            return (
                f"{repository} could not be written to {constants.HF_HUB_CACHE} ({error}). Check "
                "its disk and permissions, or set HF_HUB_CACHE to another folder."
            )


@contextmanager
def answer(
    client: httpx2.Client, url: str, stop: StopSignal, query: _Query = (), **headers: str
) -> Generator[httpx2.Response]:
    """The beginning of an answer below 500; raises for every refusal, whose text is not read.

    A redirect to another host loses the token: the client takes care of that.
    """
    stop.check()
    headers = {**build_hf_headers(library_name="exo-node"), "Accept-Encoding": "identity"} | headers
    watched = {"trace": stop.trace}
    with client.stream(
        "GET", url, params=[*query] or None, headers=headers, extensions=watched
    ) as response:
        if response.status_code < 500:
            _refuse(response)
        yield response


def _refuse(response: httpx2.Response) -> None:
    """Turns a status from 400 on into the hub's error."""
    status, headers = response.status_code, response.headers
    hf_raise_for_status(httpx2.Response(status, headers=headers, request=response.request))


@dataclass(frozen=True, slots=True)
class HubLists:
    """`endpoint`: by default the hub, or HF_ENDPOINT's. `stop` ends what is being read."""

    client: httpx2.Client
    endpoint: str | None
    stop: StopSignal

    def newest_commit(self, repository: RepositoryName, revision: Revision | None) -> Commit:
        path = f"models/{repository}"
        if revision is not None:
            path += f"/revision/{quote(revision, safe='')}"
        with self.stop.limit(_LIST_S, repository):
            content, _ = self._get(path, (), repository)
        sha = _checked(_OBJECT, content, repository).get("sha")
        if (commit := Commit.read(sha)) is None:
            fault = f"{str(sha)[:80]!r} is no commit, which has 40 hex digits"
            raise wrong_answer(repository, fault)
        return commit

    def files(self, repository: RepositoryName, commit: Commit) -> list[RemoteFile]:
        """The files that a download fetches. Raises DownloadFailed where they are no model."""
        files, entries = list[RemoteFile](), 0
        query: _Query = (("recursive", "true"), ("expand", "false"))
        with self.stop.limit(_LIST_S, repository):
            for _ in range(_MOST_PAGES):
                content, query = self._get(f"models/{repository}/tree/{commit}", query, repository)
                page = _checked(_LIST, content, repository)
                entries += len(page)
                files += [file for each in page if (file := _remote_file(repository, each))]
                if not query or entries > _MOST_ENTRIES or len(files) > _MOST_FILES:
                    break
                if not page:
                    raise wrong_answer(repository, "it lists pages without files")
        if query or entries > _MOST_ENTRIES or len(files) > _MOST_FILES:
            raise DownloadFailed(
                f"{repository} has too many files for a model: over {_MOST_ENTRIES:,}, or over "
                f"{_MOST_FILES:,} of weights, configs and tokenizers. Choose another repository.",
                param="model",
            )
        _require_model(repository, files)
        return files

    def search(self, text: str, limit: int) -> list[Entry]:
        """Repositories with safetensors, the most downloaded first."""
        query = [("search", text), ("filter", "safetensors"), ("sort", "downloads")]
        query += [("limit", str(limit)), *(("expand", fact) for fact in _FACTS)]
        with self.stop.limit(_LIST_S, about := "a search"):
            content, _ = self._get("models", query, about)
        return _checked(_LIST, content, about)[:limit]

    def _get(self, path: str, query: _Query, about: str) -> tuple[bytes, _Query]:
        """One answer, and the query of the next page; of its address nothing else is believed."""
        url = f"{self.endpoint or constants.ENDPOINT}/api/{path}"
        with answer(self.client, url, self.stop, query) as response:
            _refuse(response)
            content = read(response, _PAGE_BYTES, about)
            following = response.links.get("next", {}).get("url", "")
        return content, parse_qsl(urlsplit(following).query)


def read(response: httpx2.Response, most_bytes: int, about: str) -> bytes:
    """The whole answer. Raises DownloadFailed for a longer one."""
    content = bytearray()
    for piece in response.iter_bytes():
        content += piece
        if len(content) > most_bytes:
            raise wrong_answer(about, f"it has over {most_bytes:,} bytes")
    return bytes(content)


def _checked(form: TypeAdapter[T], content: bytes, about: str) -> T:
    if not fits(content):
        raise wrong_answer(about, "it has more lists, objects and values than a list of files")
    try:
        return form.validate_python(json.loads(content))
    except (ValueError, RecursionError) as error:
        raise wrong_answer(about, " ".join(str(error).split())[:200]) from error


def _remote_file(repository: RepositoryName, entry: Entry) -> RemoteFile | None:
    """The file, or None if a download leaves it out. The hub has the SHA-256 only of files in LFS,
    where it keeps all weights."""
    kind, name = entry.get("type"), entry.get("path")
    if not isinstance(kind, str) or not isinstance(name, str):
        raise wrong_answer(repository, f"it lists a file {str(name)[:80]!r}")
    if kind != "file" or not is_model_file(name):
        return None
    if (path := FilePath.read(name)) is None:
        raise wrong_answer(repository, f"it lists a file {name[:80]!r}")
    lfs: object = entry.get("lfs")
    try:
        fields = entry if lfs is None else _OBJECT.validate_python(lfs)
    except ValueError as error:
        raise wrong_answer(repository, f"{path} has no size") from error
    size, hash = fields.get("size"), fields.get("oid")
    if type(size) is not int or not 0 <= size < 1 << 62:
        raise wrong_answer(repository, f"{path} has {str(size)[:80]!r} bytes")
    checked = FileHash.read(hash) if lfs is None else Sha256.read(hash)
    if checked is None:
        raise wrong_answer(repository, f"{path} has the hash {str(hash)[:80]!r}")
    return RemoteFile(path, size, checked)


def _require_model(repository: RepositoryName, files: Sequence[RemoteFile]) -> None:
    """Requires files of a model. Raises DownloadFailed."""
    names = {file.path for file in files}
    if len(names) < len(files):
        raise wrong_answer(repository, "it lists a file twice")
    if "config.json" not in names or not any(map(is_weight_file, names - set(HEAD_FILES))):
        raise DownloadFailed(
            f"{repository} has no config.json with model*.safetensors beside it. Choose "
            "a repository in safetensors format; GGUF and .bin files are not read.",
            param="model",
        )

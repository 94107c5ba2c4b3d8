"""Downloads, against a hub on loopback that refuses, breaks off and lies."""

import hashlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hub import COMMIT, MODEL, REPOSITORY, FakeHub, serve
from huggingface_hub import close_session
from models import make_checkpoint
from permissions import permissions_hold

from exo_node.node.store import hub_download
from exo_node.node.store.hub_cache import HubCache, is_own
from exo_node.node.store.hub_download import download
from exo_node.node.store.model_folder import is_model_file
from exo_node.node.store.transfers import Progress
from exo_node.placement.errors import DownloadFailed
from exo_node.shard.checkpoint.checkpoint import read_checkpoint

EXPECTED = {MODEL, "config.json", "tokenizer.json", "chat_template.jinja"}
"""The files of `hub` that are fetched."""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    folder = make_checkpoint(tmp_path / "source", "qwen3_5", hidden=128)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    files |= {
        "modeling.py": b"raise SystemExit",
        "tokenizer.py": b"raise SystemExit",
        "pytorch_model.bin": b"pickle",
        "consolidated.safetensors": b"again",
        "original/model.safetensors": b"again",
        "README.md": b"# tiny",
        "tokenizer.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
    }
    hub = FakeHub(files)
    with serve(hub):
        yield hub


def ignore(_: Progress) -> None:
    pass


def get(
    hub: FakeHub, cache: Path, report: Callable[[Progress], None] = ignore, *, offline: bool = False
) -> Path:
    return download(
        REPOSITORY, None, report, offline=offline, endpoint=hub.url, cache=HubCache(cache)
    )


def test_a_download_brings_a_checkpoint_that_reads_and_nothing_that_is_not_needed(
    hub: FakeHub, tmp_path: Path
) -> None:
    snapshot = get(hub, tmp_path / "cache")
    assert {path.name for path in snapshot.iterdir()} == hub.fetched() == EXPECTED
    assert {path for _, path, _ in hub.requests} == EXPECTED
    assert read_checkpoint(snapshot).tensors
    assert (snapshot / MODEL).read_bytes() == hub.files[MODEL]


@pytest.mark.parametrize(
    ("path", "downloaded"),
    [
        ("model-00001-of-00002.safetensors", True),
        ("model.safetensors.index.json", True),
        ("mtp/weights.safetensors", True),
        ("1_Pooling/config.json", True),
        ("2_Dense/config.json", False),
        ("additional_chat_templates/tool_use.jinja", True),
        ("additional_chat_templates/../tool_use.jinja", False),
        ("additional_chat_templates/rag.jinja", False),
        ("tokenizer.model", True),
        ("merges.txt", True),
        ("model.bin", False),
        ("model.pt", False),
        ("model.gguf", False),
        ("tokenizer.py", False),
        ("consolidated.safetensors", False),
        ("original/model.safetensors", False),
        ("../model.safetensors", False),
    ],
)
def test_only_weights_configs_and_tokenizers_are_downloaded(path: str, downloaded: bool) -> None:
    assert is_model_file(path) is downloaded


def test_progress_never_falls_and_ends_at_the_total(hub: FakeHub, tmp_path: Path) -> None:
    hub.cut_after, hub.ignore_ranges = [len(hub.files[MODEL]) // 2], True
    reports: list[Progress] = []
    get(hub, tmp_path / "cache", reports.append)
    counts = [progress.done_bytes for progress in reports]
    assert counts == sorted(counts) and counts[0] == 0
    total = sum(len(data) for name, data in hub.files.items() if is_model_file(name))
    assert counts[-1] == total and {progress.total_bytes for progress in reports} == {total}
    assert MODEL in {progress.file for progress in reports}


def test_a_connection_that_breaks_off_is_resumed_with_a_range_request(
    hub: FakeHub, tmp_path: Path
) -> None:
    half = len(hub.files[MODEL]) // 2
    hub.cut_after = [half]
    snapshot = get(hub, tmp_path / "cache")
    assert hub.ranges(MODEL) == [None, f"bytes={half}-"]
    assert (snapshot / MODEL).read_bytes() == hub.files[MODEL]


def test_a_download_that_was_cancelled_resumes(hub: FakeHub, tmp_path: Path) -> None:
    cache = tmp_path / "cache"

    class Cancelled(Exception):
        pass

    def cancel(progress: Progress) -> None:
        if progress.file == MODEL:
            raise Cancelled

    with pytest.raises(Cancelled):
        get(hub, cache, cancel)
    assert HubCache(cache).locate(REPOSITORY) is None
    [partial] = cache.rglob("*.incomplete")
    resumed_at = partial.stat().st_size
    assert 0 < resumed_at < len(hub.files[MODEL])
    reports: list[Progress] = []
    snapshot = get(hub, cache, reports.append)
    assert hub.ranges(MODEL) == [None, f"bytes={resumed_at}-"]
    small = sum(len(hub.files[name]) for name in hub.files if is_model_file(name) and name != MODEL)
    assert reports[0].done_bytes == resumed_at + small  # those come first
    assert (snapshot / MODEL).read_bytes() == hub.files[MODEL]


def test_a_server_without_ranges_makes_the_file_start_over(hub: FakeHub, tmp_path: Path) -> None:
    """And the bytes that it sends twice count once."""
    cache = tmp_path / "cache"

    def check(progress: Progress) -> None:
        if progress.file == MODEL:
            [partial] = cache.rglob("*.incomplete")
            assert progress.done_bytes <= partial.stat().st_size + (128 << 10)

    hub.cut_after, hub.ignore_ranges = [len(hub.files[MODEL]) // 2], True
    snapshot = get(hub, cache, check)
    assert (snapshot / MODEL).read_bytes() == hub.files[MODEL]


@pytest.mark.parametrize(
    ("pauses", "down", "cuts", "why"),
    [
        ((0.0, 0.0), [503, 502], [], ""),
        ((), [503], [], "the server answered 503"),
        ((0.0, 0.0), [], [10, 10, 10, 10], r"broke off at 30 of .*goes on from there"),
    ],
)
def test_a_hub_that_is_down_or_breaks_off_is_asked_again_some_times(
    hub: FakeHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pauses: tuple[float, ...],
    down: list[int],
    cuts: list[int],
    why: str,
) -> None:
    monkeypatch.setattr(hub_download, "_PAUSES_S", pauses)
    hub.down, hub.cut_after = [*down], [*cuts]
    if why:
        with pytest.raises(DownloadFailed, match=why):
            get(hub, tmp_path / "cache")
        return
    assert (get(hub, tmp_path / "cache") / MODEL).read_bytes() == hub.files[MODEL]
    assert hub.ranges(MODEL) == [None] * 3


def test_a_connection_that_brings_enough_each_time_may_break_any_number_of_times(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_download, "_PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(hub_download, "_ENOUGH_BYTES", 10)
    hub.cut_after = [10, 10, 10, 10]
    assert (get(hub, tmp_path / "cache") / MODEL).read_bytes() == hub.files[MODEL]


def leave_partial(hub: FakeHub, cache: Path, data: bytes) -> None:
    blobs = cache / "models--owner--tiny" / "blobs"
    blobs.mkdir(parents=True)
    digest = hashlib.sha256(hub.files[MODEL]).hexdigest()
    (blobs / f"{digest}.incomplete").write_bytes(data)


def test_a_damaged_file_is_refused_and_then_fetched_again(hub: FakeHub, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    leave_partial(hub, cache, b"not its beginning")
    with pytest.raises(DownloadFailed, match="damaged"):
        get(hub, cache)
    assert (get(hub, cache) / MODEL).read_bytes() == hub.files[MODEL]


def test_a_partial_file_that_is_too_long_is_thrown_away(hub: FakeHub, tmp_path: Path) -> None:
    leave_partial(hub, tmp_path / "cache", hub.files[MODEL] + b"more")
    assert (get(hub, tmp_path / "cache") / MODEL).read_bytes() == hub.files[MODEL]


def test_a_complete_model_is_located_without_the_network(hub: FakeHub, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert HubCache(cache).locate(REPOSITORY) is None
    snapshot = get(hub, cache)
    before = list(hub.requests)
    for revision in (None, "main", COMMIT):
        assert HubCache(cache).locate(REPOSITORY, revision) == snapshot
    assert get(hub, cache, offline=True) == snapshot
    assert HubCache(cache).locate(REPOSITORY, "other") is None
    assert hub.requests == before
    (snapshot / "tokenizer.json").unlink()
    assert HubCache(cache).locate(REPOSITORY) is None


def test_without_a_listing_the_index_names_the_missing_files(tmp_path: Path) -> None:
    repository = tmp_path / "models--owner--tiny"
    snapshot = make_checkpoint(repository / "snapshots" / COMMIT, "llama", shards=2)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    assert HubCache(tmp_path).locate(REPOSITORY) == snapshot
    (snapshot / "model-00002-of-00002.safetensors").unlink()
    assert HubCache(tmp_path).locate(REPOSITORY) is None
    for path in snapshot.glob("model*"):
        path.unlink()
    assert HubCache(tmp_path).locate(REPOSITORY) is None


def test_offline_a_model_is_served_without_its_heads_own_file(hub: FakeHub, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    hub.files["mtp/weights.safetensors"] = hub.files["mtp.safetensors"] = b"head"
    snapshot = get(hub, cache)
    (snapshot / "mtp" / "weights.safetensors").unlink()
    assert HubCache(cache).locate(REPOSITORY) is None
    assert get(hub, cache, offline=True) == snapshot
    (snapshot / MODEL).unlink()
    with pytest.raises(DownloadFailed, match=r"missing: model\.safetensors, mtp/weights"):
        get(hub, cache, offline=True)


def test_offline_names_what_to_unset_and_sends_nothing(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(DownloadFailed, match="Unset EXO_OFFLINE"):
        get(hub, tmp_path / "cache", offline=True)
    assert hub.requests == []


def _roomy(_: object) -> SimpleNamespace:
    return SimpleNamespace(free=1 << 40)


@pytest.mark.skipif(shutil.which("mount") is None, reason="needs `mount`")
def test_a_disk_that_fills_up_meanwhile_is_named_and_the_download_resumes_later(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.files[MODEL] += bytes(2 << 20)
    cache = tmp_path / "cache"
    cache.mkdir()
    small = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(cache)]
    if subprocess.call(small, stderr=subprocess.DEVNULL):
        pytest.skip("needs the right to mount")
    try:
        # Another program takes the space after the check.
        monkeypatch.setattr(shutil, "disk_usage", _roomy)
        with pytest.raises(DownloadFailed, match=r"could not be written.*No space left.*Check"):
            get(hub, cache)
        arrived = sum(path.stat().st_size for path in cache.rglob("*.incomplete"))
        assert arrived > 0
        subprocess.check_call(["mount", "-o", "remount,size=64m", str(cache)])
        assert (get(hub, cache) / MODEL).read_bytes() == hub.files[MODEL]
        assert hub.ranges(MODEL)[-1] == f"bytes={arrived}-"
    finally:
        subprocess.check_call(["umount", str(cache)])


def test_a_cache_that_may_not_be_written_is_named_and_mended_takes_the_model(
    hub: FakeHub, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o555)
    with permissions_hold():
        with pytest.raises(DownloadFailed, match=r"could not be written.*denied.*permissions, or"):
            get(hub, cache)
        cache.chmod(0o755)
        assert (get(hub, cache) / MODEL).read_bytes() == hub.files[MODEL]


def test_a_model_over_the_free_space_is_refused_before_a_byte_of_it(
    hub: FakeHub, tmp_path: Path
) -> None:
    hub.sizes[MODEL] = 10**18
    with pytest.raises(DownloadFailed, match=r"needs 1,050,000,000\.00 GB more .* are free"):
        get(hub, tmp_path / "cache")
    assert hub.requests == []
    cache = HubCache(tmp_path / "cache")
    snapshot = cache.repository(REPOSITORY) / "snapshots" / COMMIT
    assert not is_own(snapshot)  # another program may fetch it


@pytest.mark.parametrize(
    ("status", "code", "remedy"),
    [
        (404, "RepoNotFound", "no model repository owner/tiny"),
        (404, "RevisionNotFound", "no revision main"),
        (403, "GatedRepo", "Accept its terms"),
        (500, "", "answered 500"),
        (429, "", "answered 429"),
    ],
)
def test_a_refusal_of_the_hub_says_what_to_do(
    hub: FakeHub, tmp_path: Path, status: int, code: str, remedy: str
) -> None:
    hub.refuse = (status, code)
    with pytest.raises(DownloadFailed, match=remedy):
        get(hub, tmp_path / "cache")


def test_an_unreachable_hub_says_so(tmp_path: Path) -> None:
    with pytest.raises(DownloadFailed, match="could not be reached"):
        get(FakeHub({}, url="http://127.0.0.1:9"), tmp_path / "cache")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("http_proxy", "localhost:abc"),
        ("HTTPS_PROXY", "ftp://user:secret@proxy"),
        ("https_proxy", "http://[::1"),
        ("ALL_PROXY", "socks5://127.0.0.1:9"),
        ("SSL_CERT_FILE", "/nonexistent"),
        ("SSLKEYLOGFILE", "/nonexistent/keys"),
    ],
)
def test_a_variable_that_the_hubs_client_cannot_use_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(DownloadFailed, match=f"^{variable} cannot be used: ") as caught:
        _ = download(REPOSITORY, None, ignore, offline=False, cache=HubCache(tmp_path))
    assert caught.value.param == variable and "secret" not in caught.value.message


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "ALL_PROXY"])
def test_downloads_go_through_a_proxy(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, hub.url)
    close_session()  # it has read the environment
    cache = HubCache(tmp_path / "cache")
    snapshot = download(
        REPOSITORY, None, ignore, offline=False, endpoint="http://hub.invalid", cache=cache
    )
    monkeypatch.delenv(variable)
    close_session()
    assert (snapshot / MODEL).read_bytes() == hub.files[MODEL]


def test_a_hub_that_begins_no_answer_is_given_up(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's client itself sets no limit for the first requests."""
    monkeypatch.setattr(hub_download, "_TIMEOUT_S", 0.1)
    hub.unanswered = f"/api/models/{REPOSITORY}"
    with pytest.raises(DownloadFailed, match=r"could not be reached .* Check the network"):
        _ = get(hub, tmp_path)
    assert get(hub, tmp_path / "cache").is_dir()


def test_a_hash_that_ends_with_a_path_is_refused_and_nothing_is_fetched(
    hub: FakeHub, tmp_path: Path
) -> None:
    """Weights are stored under their hash, so it must not choose another folder."""
    hub.digests[MODEL] = f"{'0' * 64}/../../{'0' * 64}"
    with pytest.raises(DownloadFailed, match="has the hash"):
        get(hub, tmp_path / "cache")
    assert hub.requests == []


def test_names_that_lead_out_of_the_folder_are_neither_fetched_nor_written(
    hub: FakeHub, tmp_path: Path
) -> None:
    for name in ("../model-a.safetensors", "/model-b.safetensors", "a/../../model-c.safetensors"):
        hub.files[name] = b"out"
    snapshot = get(hub, tmp_path / "cache")
    assert {path.name for path in snapshot.iterdir()} == hub.fetched() == EXPECTED
    assert not [path for path in tmp_path.rglob("*model-*") if "cache" not in path.parts]


def test_a_repository_of_countless_files_is_refused_before_any_is_fetched(
    hub: FakeHub, tmp_path: Path
) -> None:
    hub.files |= {f"{number}.json": b"{}" for number in range(2001)}
    with pytest.raises(DownloadFailed, match="too many files for a model"):
        _ = get(hub, tmp_path / "cache")
    assert hub.requests == []
    assert not [*(tmp_path / "cache").rglob("*.json")]


@pytest.mark.parametrize("weights", ["", "pytorch_model.bin", "model.pkl", "model.pt"])
def test_a_repository_of_pickles_alone_is_refused_before_any_is_fetched(
    hub: FakeHub, tmp_path: Path, weights: str
) -> None:
    hub.files = {"config.json": b"{}", weights: b"\x80"}
    with pytest.raises(DownloadFailed, match=r"in safetensors format; GGUF and \.bin"):
        _ = get(hub, tmp_path / "cache")
    assert hub.requests == []


MALFORMED = ("tiny", "a/b/c", "../tiny", "owner/..", "owner/a..b", "/tiny", "owner/", "o/a--b")


@pytest.mark.parametrize("repository", [*MALFORMED, "o/a\0", ""])
def test_a_malformed_repository_is_refused_everywhere(repository: str, tmp_path: Path) -> None:
    with pytest.raises(DownloadFailed, match="Write owner/name"):
        HubCache(tmp_path).locate(repository)
    with pytest.raises(DownloadFailed, match="Write owner/name"):
        download(repository, None, ignore, offline=True, cache=HubCache(tmp_path))


@pytest.mark.parametrize("revision", ["../main", "/etc", "a/../b", "", "a b"])
def test_a_malformed_revision_is_refused(revision: str, tmp_path: Path) -> None:
    with pytest.raises(DownloadFailed, match="Name a branch"):
        HubCache(tmp_path).locate(REPOSITORY, revision)

"""A hub that lies in each identifier of each answer: nothing outside of the cache changes."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hub import COMMIT, MODEL, REPOSITORY, FakeHub, git_hash, serve
from huggingface_hub import (
    snapshot_download,  # pyright: ignore[reportUnknownVariableType]
)
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from hypothesis import given
from hypothesis import strategies as st
from models import make_checkpoint

from exo_node.node.store import hub_client
from exo_node.node.store.hub_cache import HubCache, missing_files
from exo_node.node.store.hub_download import download
from exo_node.node.store.hub_search import Hit, HubSearch
from exo_node.node.store.identifiers import Commit, FileHash, FilePath, RepositoryName, Revision
from exo_node.node.store.stop_signal import StopSignal
from exo_node.node.store.transfers import Progress
from exo_node.placement.errors import DownloadFailed

UP = "../../../../victim"
ABSOLUTE = "/tmp/exo-node-test-of-absolute-paths"
PATHS = (f"{UP}/profile", f"{UP}/new", ABSOLUTE, f"x/{UP}/profile", "a/../b", ".")
TEXTS = (*PATHS, "", "..\\..\\x", "a\0b", "a\nb", "x" * 5000, "\ud800")
ODD: tuple[object, ...] = (*TEXTS, None, -7, True, [], {})


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    folder = make_checkpoint(tmp_path / "source", "qwen3_5", hidden=64)
    hub = FakeHub({path.name: path.read_bytes() for path in folder.iterdir()})
    with serve(hub):
        yield hub


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder of a person, beside the cache, to which the lies lead."""
    if os.path.isfile(ABSOLUTE):  # of a run that failed
        os.unlink(ABSOLUTE)
    shutil.rmtree(ABSOLUTE, ignore_errors=True)
    folder = tmp_path / "victim"
    folder.mkdir()
    _ = (folder / "profile").write_text("mine")
    _ = (folder / "config.json").write_text("{}")
    return folder


def contents(root: Path, cache: Path) -> dict[str, bytes]:
    """All files below `root` but for the cache."""
    files = (path for path in root.rglob("*") if path.is_file() and cache not in path.parents)
    return {str(path): path.read_bytes() for path in files}


def get(hub: FakeHub, cache: Path) -> str:
    """The outcome of a download: "done", or the sentence of its error."""
    try:
        place, report = HubCache(cache), list[Progress]().append
        _ = download(REPOSITORY, None, report, offline=False, endpoint=hub.url, cache=place)
    except DownloadFailed as fault:
        return fault.message
    return "done"


def find(hub: FakeHub) -> list[Hit]:
    return HubSearch(hub.url).find("tiny", 100, StopSignal(), 60.0)


def attack(hub: FakeHub, tmp_path: Path) -> str:
    """The outcome of a download into a fresh cache; asserts that nothing else changed."""
    cache = tmp_path / "home" / "hub"
    before = contents(tmp_path, cache)
    outcome = get(hub, cache)
    assert contents(tmp_path, cache) == before and not os.path.lexists(ABSOLUTE)
    for path in cache.rglob("*"):
        assert not path.is_symlink() or cache in path.resolve().parents
    assert [place.id for place in HubCache(cache).models()] in ([], [REPOSITORY])
    return outcome


Lie = Callable[[Any, object], object]
"""From an answer in JSON and a value to the answer with a lie."""


def _set(field: str) -> Lie:
    return lambda answer, value: {**answer, field: value}


def _entry(field: str, file: str) -> Lie:
    """A lie about one file; `field` may be one of `lfs`."""

    def lie(answer: Any, value: object) -> object:
        for entry in answer:
            if entry["path"] == file:
                target = entry["lfs"] if field.startswith("lfs.") else entry
                target[field.removeprefix("lfs.")] = value
        return answer

    return lie


def _more(answer: Any, value: object) -> object:
    return [*answer, {"type": "file", "path": value, "size": 2, "oid": git_hash(b"{}")}]


def _of_the_commit(hub: FakeHub, lie: Lie, value: object) -> None:
    hub.lies["/revision/main"] = hub.lies[f"/api/models/{REPOSITORY}"] = lambda a: lie(a, value)


def _of_the_files(hub: FakeHub, lie: Lie, value: object) -> None:
    hub.lies[f"/tree/{COMMIT}"] = lambda answer: lie(answer, value)


FIELDS: dict[str, tuple[Callable[[FakeHub, Lie, object], None], Lie]] = {
    "commit": (_of_the_commit, _set("sha")),
    "config's hash": (_of_the_files, _entry("oid", "config.json")),
    "config's size": (_of_the_files, _entry("size", "config.json")),
    "weights' hash": (_of_the_files, _entry("lfs.oid", MODEL)),
    "weights' size": (_of_the_files, _entry("lfs.size", MODEL)),
}


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.usefixtures("victim")
def test_a_lie_in_a_field_ends_the_download_with_one_sentence(
    hub: FakeHub, tmp_path: Path, field: str
) -> None:
    install, lie = FIELDS[field]
    for number, value in enumerate(ODD if field == "commit" else ODD[::2]):
        install(hub, lie, value)
        (home := tmp_path / str(number)).mkdir()
        outcome = attack(hub, home)
        assert "the hub's answer about owner/tiny has the wrong form" in outcome, (field, value)
        assert "HF_ENDPOINT" in outcome and len(outcome) < 600
        assert hub.fetched() == set()


@pytest.mark.parametrize("begin", [b"[", b'[{"x":['])
def test_objects_without_number_are_refused_before_they_are_parsed(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: bytes
) -> None:
    """Parsing holds the interpreter's lock: 16 MB of empty objects stopped a node for 3 s."""
    parsed = list[int]()

    def loads(text: bytes) -> Any:
        parsed.append(len(text))
        return json.loads(text)

    monkeypatch.setattr(hub_client, "json", SimpleNamespace(loads=loads))
    for path in (f"/tree/{COMMIT}", "/api/models"):
        hub.lies[path] = lambda _: begin + b"{}," * 120_000
    assert "more lists, objects and values" in attack(hub, tmp_path)
    with pytest.raises(DownloadFailed, match="more lists, objects and values"):
        _ = find(hub)
    assert max(parsed) < 1000


@pytest.mark.usefixtures("victim")
def test_names_of_further_files_lead_nowhere(hub: FakeHub, tmp_path: Path) -> None:
    weights = [f"model{name}.safetensors" for name in TEXTS]
    for number, value in enumerate((*ODD, *weights, "x\0.json")):
        hub.refuse = None
        _of_the_files(hub, _more, value)
        (home := tmp_path / str(number)).mkdir()
        outcome = attack(hub, home)
        assert outcome == "done" or "wrong form" in outcome or "answered 404" in outcome, value


@pytest.mark.parametrize(
    ("status", "value"),
    [
        *((200, value) for value in (*PATHS, "f" * 40, "ssh-ed25519 AAAA attacker", "")),
        *((status, PATHS[0]) for status in (302, 404)),
    ],
)
def test_a_file_of_another_commit_ends_the_download(
    hub: FakeHub, tmp_path: Path, victim: Path, value: str, status: int
) -> None:
    hub.headers, hub.status = {"X-Repo-Commit": value}, status
    outcome = attack(hub, tmp_path)
    assert "answered 404" in outcome if status == 404 else f"of commit {value!r}" in outcome
    assert (victim / "profile").read_text() == "mine"


@pytest.mark.parametrize("value", [f'"{value}"' for value in PATHS] + ["", f'W/"{UP}/profile"'])
def test_etags_choose_no_path(hub: FakeHub, tmp_path: Path, victim: Path, value: str) -> None:
    hub.headers = {"ETag": value, "X-Linked-Etag": value}
    assert attack(hub, tmp_path) == "done"
    assert {path.name for path in victim.iterdir()} == {"profile", "config.json"}


WHOLE_ANSWERS = (
    *(b"<html>please log in</html>", b"[" * 200_000 + b"]" * 200_000, b"[]", b"{}", b"null", b"7"),
    *(b'"text"', b"", b"\xff\xfe", b"[[]]", b'[{"type": "file"}]', b'[{"path": "config.json"}]'),
    b'{"siblings": [{}]}',
)


@pytest.mark.parametrize("path", [f"/api/models/{REPOSITORY}", f"/tree/{COMMIT}"])
def test_an_answer_of_the_wrong_form_is_said_to_be_the_hubs_fault(
    hub: FakeHub, tmp_path: Path, path: str
) -> None:
    for number, answer in enumerate(WHOLE_ANSWERS):
        hub.lies[path] = lambda _, answer=answer: answer
        (home := tmp_path / str(number)).mkdir()
        outcome = attack(hub, home)
        empty = answer == b"[]" and "tree" in path
        expected = "has no config.json" if empty else "owner/tiny has the wrong form"
        assert expected in outcome, (answer[:40], outcome)
        assert hub.fetched() == set()


@pytest.mark.parametrize("answer", [*WHOLE_ANSWERS, b'[{"modelId": "a/b"}]'])
def test_a_search_whose_answer_has_the_wrong_form_says_so(hub: FakeHub, answer: bytes) -> None:
    hub.lies["/api/models"] = lambda _: answer
    if answer in (b"[]", b'[{"type": "file"}]') or answer.startswith((b'[{"path', b'[{"modelId')):
        assert find(hub) == []
        return
    with pytest.raises(DownloadFailed, match="a search has the wrong form"):
        _ = find(hub)


def test_one_malformed_hit_hides_no_other(hub: FakeHub) -> None:
    sound = hub.found("tiny")[0]
    bad_ids = [{**sound, "id": value} for value in ODD]
    bad_commits = [{**sound, "id": "owner/other", "sha": value} for value in ODD]
    hub.lies["/api/models"] = lambda _: [*bad_ids, sound, *bad_commits]
    hits = find(hub)
    assert {hit.repository for hit in hits} == {REPOSITORY, "owner/other"}
    for hit in hits:
        expected = "" if hit.repository == REPOSITORY else "names no commit"
        assert expected in hit.contents.fault and bool(hit.contents.config) == (not expected)


@pytest.mark.parametrize("text", [UP, f"{UP}/", "..", "", "main", "\0", "x" * 5000, "f" * 41])
def test_a_branchs_file_in_the_cache_chooses_no_folder(
    hub: FakeHub, tmp_path: Path, victim: Path, text: str
) -> None:
    """Another program's client may have believed a hub, and written what it said."""
    cache = HubCache(tmp_path / "home" / "hub")
    refs = cache.repository(REPOSITORY) / "refs"
    refs.mkdir(parents=True)
    _ = (refs / "main").write_text(text)
    assert cache.snapshot(REPOSITORY, None) is None and cache.locate(REPOSITORY) is None
    assert [*cache.models()] == []
    assert get(hub, cache.folder) == "done"
    assert (refs / "main").read_text() == COMMIT and len([*victim.iterdir()]) == 2


def test_a_listing_that_another_program_left_leads_nowhere(hub: FakeHub, tmp_path: Path) -> None:
    cache = HubCache(tmp_path / "hub")
    assert get(hub, cache.folder) == "done"
    snapshot = cache.snapshot(REPOSITORY, None)
    assert snapshot is not None
    (cache.repository(REPOSITORY) / ".exo-node" / COMMIT).unlink()
    names = ["config.json", *(f"{name}.json" for name in TEXTS)]
    trees = cache.repository(REPOSITORY) / "trees"
    trees.mkdir()
    files = {name: {"size": 1, "blob_id": "0" * 40} for name in names}
    _ = (trees / f"{COMMIT}.json").write_text(json.dumps({"format_version": 1, "files": files}))
    assert set(missing_files(snapshot)) <= {".json", "..json"}


def test_small_files_are_hashed_too(hub: FakeHub, tmp_path: Path) -> None:
    config = hub.files["config.json"]
    _of_the_files(hub, _entry("oid", "config.json"), git_hash(config + b" "))
    assert "config.json arrived damaged" in get(hub, tmp_path / "hub")
    assert HubCache(tmp_path / "hub").snapshot(REPOSITORY, None) is None


def test_a_small_file_without_end_is_read_to_its_listed_size(hub: FakeHub, tmp_path: Path) -> None:
    hub.more["config.json"] = b" " * (8 << 20)
    assert get(hub, tmp_path / "hub") == "done"
    blobs = HubCache(tmp_path / "hub").repository(REPOSITORY) / "blobs"
    assert sum(path.stat().st_size for path in blobs.iterdir()) == sum(map(len, hub.files.values()))


def test_a_cache_that_the_hubs_client_made_is_completed_and_read_by_it(
    hub: FakeHub, tmp_path: Path
) -> None:
    def by_client() -> Path:
        return Path(snapshot_download(REPOSITORY, cache_dir=tmp_path, endpoint=hub.url))

    assert get(hub, tmp_path) == "done"
    before = len(hub.requests)
    snapshot = by_client()
    assert len(hub.requests) == before  # each file is where the client looks for it
    (snapshot / "config.json").unlink()
    assert get(hub, tmp_path) == "done" and by_client() == snapshot
    assert len(hub.requests) == before


@given(st.from_regex(r"[\w.\-/@ ]{1,30}"))
def test_names_of_repositories_are_those_that_the_hubs_client_takes(text: str) -> None:
    try:
        validate_repo_id(text)
        valid = text.count("/") == 1
    except HFValidationError:
        valid = False
    assert bool(RepositoryName.read(text)) == valid


@pytest.mark.parametrize("kind", [RepositoryName, Revision, Commit, FileHash, FilePath])
def test_no_identifier_leads_out_of_a_folder(kind: type[FilePath], tmp_path: Path) -> None:
    for value in ODD:
        if (checked := kind.read(value)) is not None:
            assert tmp_path in (tmp_path / checked).resolve().parents, value
        elif isinstance(value, str):
            with pytest.raises(ValueError, match=kind.__name__):
                _ = kind(value)

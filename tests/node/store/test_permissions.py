"""A file that cannot be read is named, with its remedy, and hides no other model."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hub import COMMIT
from huggingface_hub import constants
from models import make_checkpoint
from permissions import permissions_hold

from exo_node.node.store.hub_download import download
from exo_node.node.store.library import ModelLibrary
from exo_node.placement.errors import ExoNodeError, ModelNotFound
from exo_node.placement.ids import ModelId

REPOSITORY = "models--me--cached"


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`models` with `own` and `publisher/deep`, and `hub` with `me/cached`."""
    folder = tmp_path_factory.mktemp("disk")
    make_checkpoint(folder / "models" / "own", "llama")
    make_checkpoint(folder / "models" / "publisher" / "deep", "llama")
    refs = folder / "hub" / REPOSITORY / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text(COMMIT)
    make_checkpoint(folder / "hub" / REPOSITORY / "snapshots" / COMMIT, "llama")
    return folder


@pytest.fixture
def library(disk: Path, monkeypatch: pytest.MonkeyPatch) -> ModelLibrary:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(disk / "hub"))
    return ModelLibrary((disk / "models",), offline=True)


@contextmanager
def closed(path: Path, mode: int = 0) -> Generator[None]:
    before = path.stat().st_mode
    path.chmod(mode)
    try:
        with permissions_hold():
            yield
    finally:
        path.chmod(before)


ALL = {"demo", "own", "publisher/deep", "me/cached"}
SNAPSHOT = f"hub/{REPOSITORY}/snapshots/{COMMIT}"
MODES = [0, 0o444, 0o111]


@pytest.mark.parametrize(
    ("path", "id", "hidden", "mode"),
    [
        *(("models", None, {"own", "publisher/deep"}, mode) for mode in MODES),
        *(("models/own", "own", {"own"}, mode) for mode in MODES),
        ("models/publisher", "publisher", {"publisher/deep"}, 0),
        ("models/publisher/deep", "publisher/deep", {"publisher/deep"}, 0),
        ("models/own/config.json", "own", {"own"}, 0),
        ("models/own/model.safetensors", "own", {"own"}, 0),
        ("hub", None, {"me/cached"}, 0),
        *((f"hub/{REPOSITORY}", "me/cached", {"me/cached"}, mode) for mode in MODES),
        (f"hub/{REPOSITORY}/snapshots", "me/cached", {"me/cached"}, 0),
        (f"hub/{REPOSITORY}/refs/main", "me/cached", {"me/cached"}, 0),
        (SNAPSHOT, "me/cached", {"me/cached"}, 0),
        (f"{SNAPSHOT}/model.safetensors", "me/cached", {"me/cached"}, 0),
    ],
)
def test_a_file_that_cannot_be_read_is_named_and_hides_nothing_else(
    disk: Path, library: ModelLibrary, path: str, id: str | None, hidden: set[str], mode: int
) -> None:
    with closed(disk / path, mode):
        assert set(library.scan()) == ALL - hidden
        assert set(library.broken) == {id or str(disk / path)}
        message = next(iter(library.broken.values())).message
        assert "cannot be read (Permission denied)" in message and "end its permissions" in message
        for model in hidden:
            with pytest.raises(ExoNodeError, match=r"cannot be read .*end its permissions"):
                _ = library.get(ModelId(model))
        assert "Qwen/Qwen3.6-27B" in library.catalogue()
    assert set(library.scan()) == ALL and not library.broken


def test_the_error_for_an_unknown_model_names_a_folder_that_may_have_it(
    disk: Path, library: ModelLibrary
) -> None:
    with closed(disk / "models"), pytest.raises(ModelNotFound, match="models cannot be read"):
        _ = library.get(ModelId("something"))


def silent(_: object) -> None:
    pass


def pulled_offline(_: ModelLibrary) -> object:
    return download("me/cached", None, silent, offline=True)


def pulled(_: ModelLibrary) -> object:
    return download("me/cached", None, silent, offline=False)


def removed(library: ModelLibrary) -> object:
    return library.removal("me/cached", Path("/nowhere"))


@pytest.mark.parametrize(
    ("path", "work"), [("hub", pulled_offline), (SNAPSHOT, pulled), ("hub", removed)]
)
def test_pull_and_rm_name_the_folder_that_cannot_be_read(
    disk: Path, library: ModelLibrary, path: str, work: Callable[[ModelLibrary], object]
) -> None:
    with closed(disk / path), pytest.raises(ExoNodeError, match="cannot be read"):
        _ = work(library)


def test_a_model_that_cannot_be_deleted_stays_whole(disk: Path, library: ModelLibrary) -> None:
    files = {path for path in (disk / "models/own").iterdir()}
    with (
        closed(disk / "models/own", 0o555),
        pytest.raises(ExoNodeError, match="mend the permissions and try again"),
    ):
        library.removal("own", disk / "models").carry_out()
    assert {path for path in (disk / "models/own").iterdir()} == files

"""The files that peers may copy of a node's models, and the requests that it refuses."""

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from copying import MODEL, write_model

from exo_node.node.store.library import ModelLibrary
from exo_node.node.store.model_folder import CopyOrigin, write_origin
from exo_node.node.store.sharing import SharedModels
from exo_node.placement.errors import ExoNodeError, InvalidRequest, ModelNotFound
from exo_node.proto import peer_pb2 as pb

FIRST = "model-00001-of-00003.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "models" / MODEL)


@pytest.fixture
def shared(tmp_path: Path, folder: Path) -> SharedModels:
    return SharedModels(ModelLibrary([tmp_path / "models"], offline=True))


def request_for(path: str, start: int = 0, model: str = MODEL) -> pb.FileRequest:
    return pb.FileRequest(model=model, path=path, start=start)


def test_the_files_of_a_model_are_offered_and_nothing_else(
    shared: SharedModels, folder: Path
) -> None:
    for name in ("secret.txt", "run.py", "pytorch_model.bin"):
        _ = (folder / name).write_text("{}")
    write_origin(folder, CopyOrigin(MODEL, from_hub=False, fingerprint="", whole=True))
    offered = [file.path for file in shared.offer(MODEL).files]
    assert [name for name in offered if "model-" not in name] == [
        "config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    with closing(shared.open(request_for(FIRST, 8))) as file:
        assert file.read() == (folder / FIRST).read_bytes()[8:]
        assert file.read() == b""


@pytest.mark.parametrize(
    ("request_", "fault", "says"),
    [
        (request_for("../../secret"), InvalidRequest, "is not one of the files"),
        (request_for("/etc/passwd"), InvalidRequest, "is not one of the files"),
        (request_for(""), InvalidRequest, "is not one of the files"),
        (request_for("exo-copy.json"), InvalidRequest, "is not one of the files"),
        (request_for(FIRST, 1 << 52), InvalidRequest, "were asked for"),
        (request_for(FIRST, model="../tiny"), ModelNotFound, "is not on this node"),
        (request_for(FIRST, model="maker/else"), ModelNotFound, "is not on this node"),
    ],
)
def test_a_hostile_request_is_refused(
    shared: SharedModels, request_: pb.FileRequest, fault: type[ExoNodeError], says: str
) -> None:
    with pytest.raises(fault, match=says):
        _ = shared.open(request_)


@pytest.mark.parametrize("outside", ["..", f"models/{MODEL}-private"])
def test_a_link_out_of_the_folder_is_not_given(
    shared: SharedModels, folder: Path, tmp_path: Path, outside: str
) -> None:
    secret = tmp_path / outside / "secret.json"
    secret.parent.mkdir(exist_ok=True)
    _ = secret.write_text("{}")
    (folder / "added.json").symlink_to(secret)
    with pytest.raises(InvalidRequest, match=r"added\.json of .* is a link out"):
        _ = shared.offer(MODEL)


def _grow(path: Path, _: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def _touch(path: Path, _: Path) -> None:
    os.utime(path, ns=(1, 1))


def _link(path: Path, secret: Path) -> None:
    path.unlink()
    path.symlink_to(secret)


def _delete(path: Path, _: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("change", [_grow, _touch, _link, _delete])
def test_a_file_that_changes_is_not_given_on(
    shared: SharedModels, folder: Path, tmp_path: Path, change: Callable[[Path, Path], None]
) -> None:
    secret = tmp_path / "secret"
    _ = secret.write_bytes((folder / FIRST).read_bytes())
    _ = shared.offer(MODEL)
    change(folder / FIRST, secret)
    with pytest.raises(InvalidRequest, match=r"changed|cannot be read"):
        _ = shared.open(request_for(FIRST))


def test_a_file_that_changes_while_it_is_read_ends_the_read(
    shared: SharedModels, folder: Path
) -> None:
    with closing(shared.open(request_for(FIRST))) as file:
        with (folder / FIRST).open("r+b") as other:
            _ = other.write(b"????")
        os.utime(folder / FIRST, ns=(5, 5))
        with pytest.raises(InvalidRequest, match="has changed"):
            _ = file.read()


def test_a_file_of_the_hubs_cache_is_given_by_the_hash_in_its_name(tmp_path: Path) -> None:
    whole = write_model(tmp_path / "whole")
    repository = tmp_path / "models--maker--tiny"
    snapshot = repository / "snapshots" / "c0ffee"
    (repository / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(whole.iterdir())):
        blob = repository / "blobs" / f"{number:064x}"
        _ = path.rename(blob)
        (snapshot / path.name).symlink_to(blob)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "linked").symlink_to(snapshot)
    library = ModelLibrary([tmp_path / "models"], offline=True)
    # A folder that is itself a link to a snapshot: its files stay in the link's own repository.
    offer = SharedModels(library).offer("linked")
    assert offer.from_hub
    [first] = [file for file in offer.files if file.path == FIRST]
    assert int(first.sha256, 16) < 10

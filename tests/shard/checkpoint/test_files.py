"""Files are replaced whole: a reader sees the old or the new content, a full disk the old one."""

import ast
import os
from pathlib import Path

import pytest

from exo_node.shard.checkpoint.files import write_atomic

ROOT = Path(__file__).parents[3]
WRITERS = {
    "node/store/hub_cache.py",
    "node/store/transfers.py",
    "shard/checkpoint/files.py",
    "shard/kernels/code_store.py",
    "shard/tools/convert/graft.py",
    "shard/tools/convert/shards.py",
}
"""The one writer; the hub cache's blobs on a disk without
links; partial files of downloads and copies, which outlive their processes; machine code, which is
lost without harm; and weights, which MLX writes, and which do not fit into memory as bytes."""


def test_a_file_is_replaced_and_nothing_stays_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "it"
    for text in (b"old", b"new"):
        write_atomic(path, text, sync=True)
        assert path.read_bytes() == text
    assert [each.name for each in path.parent.iterdir()] == ["it"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_for_others_can_be_read_by_them(tmp_path: Path) -> None:
    write_atomic(tmp_path / "it", b"x", mode=0o644)
    assert (tmp_path / "it").stat().st_mode & 0o400
    assert (tmp_path / "it").stat().st_mode & 0o777 == 0o644 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    _ = os.umask(mask)
    return mask


def test_a_folder_that_is_gone_stays_gone(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_atomic(tmp_path / "gone" / "it", b"x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", ["os.fsync", "pathlib.Path.replace"])
def test_a_full_disk_leaves_the_old_file_and_no_draft(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "it"
    write_atomic(path, b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(step, full)
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        write_atomic(path, b"new", sync=True)
    monkeypatch.undo()
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"old"]


def replaces(source: str) -> bool:
    """Whether the code puts one file in another's place by itself."""
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and (
            (node.func.attr in ("replace", "rename") and _is_path(node))
            or node.func.attr in ("mkstemp", "NamedTemporaryFile")
        )
        for node in ast.walk(ast.parse(source))
    )


def _is_path(call: ast.Call) -> bool:
    """`os.replace(a, b)`, or `draft.replace(path)`: a text's `replace` has two arguments."""
    assert isinstance(call.func, ast.Attribute)
    of_os = isinstance(call.func.value, ast.Name) and call.func.value.id == "os"
    return of_os or (len(call.args) == 1 and not call.keywords)


@pytest.mark.parametrize(
    "source", ["os.replace(a, b)", "draft.replace(path)", "tempfile.mkstemp()"]
)
def test_a_seeded_writer_is_seen(source: str) -> None:
    assert replaces(source)
    assert not replaces("text.replace('a', 'b')\nreplace(record, at=1)")


def test_no_other_file_of_node_and_shard_replaces_files() -> None:
    files = [f for room in ("node", "shard") for f in (ROOT / room).rglob("*.py")]
    writers = {f.relative_to(ROOT).as_posix() for f in files if replaces(f.read_text())}
    assert writers == WRITERS

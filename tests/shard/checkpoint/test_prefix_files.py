"""Files of prefixes are whole or absent, whatever ends their writer."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from exo_node.shard.checkpoint.prefix_files import (
    PIECE_BYTES,
    READ_AHEAD,
    StoredTensor,
    files_below,
    make_room,
    opened,
    pieces_of,
)

WRITER = """
import sys, time
from pathlib import Path
from exo_node.shard.checkpoint.files import write_atomic
from exo_node.shard.checkpoint.prefix_files import PIECE_BYTES, StoredTensor, pieces_of

def slowly():
    data = memoryview(bytes(3 * PIECE_BYTES))
    tensors = {"0": StoredTensor("U8", (data.nbytes,), data)}
    for number, piece in enumerate(pieces_of({}, tensors, lambda: None)):
        yield piece
        if number == 2:
            print("half", flush=True)
            time.sleep(600)

write_atomic(Path(sys.argv[1]), slowly())
"""


def test_a_writer_that_is_killed_leaves_no_file_but_a_partial_one_that_goes_first(
    tmp_path: Path,
) -> None:
    path = tmp_path / f"4-{'a' * 32}" / f"{'b' * 40}.safetensors"
    path.parent.mkdir()
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert writer.stdout is not None and writer.stdout.readline() == "half\n"
    finally:
        writer.kill()
        _ = writer.communicate()
    assert not path.exists()
    ((_, size, partial),) = files_below(tmp_path)
    assert size > PIECE_BYTES and partial.name.startswith(f"{path.name}.")
    with pytest.raises(ValueError), opened(partial) as file:
        _ = file.tensor("0")
    make_room(tmp_path, 0)
    assert files_below(tmp_path) == []


def test_files_that_the_cache_did_not_make_are_neither_counted_nor_deleted(tmp_path: Path) -> None:
    root, models = tmp_path / "prefixes", tmp_path / "models"
    own, name = root / f"4-{'a' * 32}", f"{'b' * 40}.safetensors"
    for folder in (models, own, root / "mine", root / "4-mine"):
        folder.mkdir(parents=True)
        _ = (folder / name).write_bytes(b"12")
    _ = (own / "model.safetensors").write_bytes(b"12")
    (root / f"4-{'c' * 32}").symlink_to(models)
    assert [each.path for each in files_below(root)] == [own / name]
    (link := tmp_path / "link").symlink_to(root)
    assert files_below(link) == []
    everything = {*tmp_path.rglob("*")}
    make_room(root, 0)
    assert everything - {*tmp_path.rglob("*")} == {own / name}


def test_a_tensor_is_read_as_it_was_written(tmp_path: Path) -> None:
    path, data = tmp_path / "a", memoryview(bytes(range(24)))
    tensors = {
        "empty": StoredTensor("F32", (0, 2), memoryview(b"")),
        "b": StoredTensor("U8", (2, 12), data),
    }
    _ = path.write_bytes(b"".join(pieces_of({"rows": 3}, tensors, lambda: None)))
    with opened(path) as file:
        assert file.description["rows"] == 3
        assert file.tensor("b") == ("U8", (2, 12), bytearray(data))
        assert file.tensor("empty") == ("F32", (0, 2), bytearray())


def _many_tensors(path: Path) -> dict[str, bytes]:
    """Writes a file of more tensors than are read ahead. Returns their bytes."""
    content = {f"{number}": bytes([number]) * (number + 1) for number in range(3 * READ_AHEAD)}
    tensors = {n: StoredTensor("U8", (len(d),), memoryview(d)) for n, d in content.items()}
    _ = path.write_bytes(b"".join(pieces_of({}, tensors, lambda: None)))
    return content


def test_tensors_come_in_the_order_of_their_names(tmp_path: Path) -> None:
    content = _many_tensors(tmp_path / "a")
    names = [*reversed(content), "3"]
    with opened(tmp_path / "a") as file:
        assert [each[2] for each in file.tensors(names)] == [content[name] for name in names]


def test_a_damaged_tensor_is_refused_after_those_before_it(tmp_path: Path) -> None:
    path = tmp_path / "a"
    content = _many_tensors(path)
    _ = path.write_bytes(path.read_bytes().replace(content["9"], b"\0" + content["9"][1:]))
    with opened(path) as file:
        tensors = file.tensors(content)
        assert [next(tensors)[2] for _ in range(9)] == list(content.values())[:9]
        with pytest.raises(ValueError, match="not those that were written"):
            _ = next(tensors)


def test_no_thread_reads_a_file_after_its_tensors(tmp_path: Path) -> None:
    names = _many_tensors(tmp_path / "a")
    with opened(tmp_path / "a") as file:
        tensors = file.tensors(names)
        _ = next(tensors)
        tensors.close()
    assert not [each for each in threading.enumerate() if each.name.startswith("prefix-reader")]


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 8, b"\xff" * 16, b"\x02" + b"\0" * 7 + b"[]", b"\x02" + b"\0" * 7 + b"{}"],
    ids=["empty", "no header", "a header without end", "a list", "no metadata"],
)
def test_another_file_is_refused(content: bytes, tmp_path: Path) -> None:
    _ = (tmp_path / "a").write_bytes(content)
    with pytest.raises(ValueError), opened(tmp_path / "a"):
        pass

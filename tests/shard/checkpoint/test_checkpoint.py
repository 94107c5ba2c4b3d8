"""Checkpoints as hostile input: whatever mx.load would misread is refused before it."""

import gc
import json
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from models import make_checkpoint

from exo_node.placement.errors import InvalidCheckpoint
from exo_node.shard.checkpoint import checkpoint, headers
from exo_node.shard.checkpoint.checkpoint import (
    MAX_CONFIG_BYTES,
    is_weight_file,
    read_checkpoint,
    read_config,
)
from exo_node.shard.checkpoint.headers import MAX_HEADER_BYTES, optional_object

ZEROS = bytes(64)


def packed(header: object, data: bytes = ZEROS, length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def one(name: str = "a", **fields: object) -> dict[str, object]:
    """A valid header of one 4 x 4 tensor, but for `fields`."""
    return {name: {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]} | fields}


def two(first: list[int], second: list[int]) -> dict[str, object]:
    def entry(offsets: list[int]) -> dict[str, object]:
        return {"dtype": "U8", "shape": [offsets[1] - offsets[0]], "data_offsets": offsets}

    return {"a": entry(first), "b": entry(second)}


def many(count: int) -> dict[str, object]:
    entry: dict[str, object] = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    return {f"model.layers.{i // 1000}.mlp.experts.{i % 1000}.w": entry for i in range(count)}


def write(folder: Path, model: bytes, config: bytes = b"{}", **others: bytes) -> Path:
    (folder / "config.json").write_bytes(config)
    (folder / "model.safetensors").write_bytes(model)
    for name, data in others.items():
        (folder / f"{name}.safetensors").write_bytes(data)
    return folder


HOSTILE = {
    "truncated data": (packed(one(), bytes(10)), "tensor 'a' ends at byte .* truncated"),
    "truncated header": (packed(one(), b"")[:20], "ends inside its header"),
    "end past the file": (packed(one(data_offsets=[0, 1 << 40])), "takes 64 bytes"),
    "both past the file": (packed(one(data_offsets=[1 << 40, (1 << 40) + 64])), "truncated"),
    "shape over its bytes": (packed(one(shape=[1024, 1024])), "takes 4194304 bytes"),
    "dimensions over int32": (packed(one(shape=[1 << 31, 1 << 31])), "impossible shape"),
    "one dimension of 2^62": (packed(one(shape=[1 << 62])), "impossible shape"),
    "product wraps to 0": (packed(one(shape=[65536] * 4, data_offsets=[0, 0])), "takes 7378"),
    "dimension truncated to 4": (packed(one(shape=[(1 << 32) + 4, 4])), "impossible shape"),
    "nine dimensions": (packed(one(shape=[1] * 8 + [16])), "impossible shape"),
    "negative dimension": (packed(one(shape=[-4, -4])), "impossible shape"),
    "negative offset": (packed(one(data_offsets=[-64, 0])), "data_offsets"),
    "offsets reversed": (packed(one(data_offsets=[64, 0])), "data_offsets"),
    "header of 2^63": (packed(one(), length=1 << 63), f"over {MAX_HEADER_BYTES}"),
    "header of 1e9": (packed(one(), length=10**9), f"over {MAX_HEADER_BYTES}"),
    "header past the file": (packed(one(), length=10**6), "ends inside its header"),
    "empty header": (packed(b""), "malformed JSON"),
    "empty file": (b"", "only 0 bytes"),
    "four bytes": (bytes(4), "only 4 bytes"),
    "a megabyte of zeros": (bytes(1 << 20), "malformed JSON"),
    "broken JSON": (packed(b'{"a":'), "malformed JSON"),
    "not UTF-8": (packed(b'{"\xff": 1}'), "malformed JSON"),
    "deep JSON": (packed(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"), "too deeply"),
    "huge number": (packed(b'{"a":' + b"9" * 10_000 + b"}"), "malformed JSON"),
    "a list": (packed([]), "JSON object"),
    "unknown dtype": (packed(one(dtype="Q9")), "dtype 'Q9'"),
    "dtype of MLX's no": (packed(one(dtype="F64", shape=[8])), "dtype 'F64'"),
    "number as dtype": (packed(one(dtype=3)), "dtype 3"),
    "list as dtype": (packed(one(dtype=["F32"])), "dtype"),
    "text as shape": (packed(one(shape="x")), "lists of integers"),
    "true as dimension": (packed(one(shape=[True, 16])), "lists of integers"),
    "float as dimension": (packed(one(shape=[4.0, 4])), "lists of integers"),
    "one offset": (packed(one(data_offsets=[0])), "lists of integers"),
    "no offsets": (packed(b'{"a": {"dtype": "F32", "shape": []}}'), "lists of integers"),
    "entry of text": (packed({"a": "x"}), "not described by an object"),
    "overlap whole": (packed(two([0, 64], [0, 64])), "tensor 'b' overlaps a"),
    "overlap by a byte": (packed(two([0, 33], [32, 64])), "tensor 'b' overlaps a"),
    "gap between": (packed(two([0, 32], [33, 64])), "tensor 'b' leaves a gap after a"),
    "gap at the start": (packed(one(shape=[4, 3], data_offsets=[16, 64])), "gap after the header"),
    "bytes left over": (packed(one(), bytes(65)), "has 1 bytes after its last tensor"),
    "key twice": (packed(b'{"a":1,"a":2}'), "occurs twice"),
    "key twice inside": (packed(b'{"a":{"dtype":"U8","dtype":"I8"}}'), "occurs twice"),
    "empty name": (packed(one("")), "unusable name"),
    "long name": (packed(one("a" * 513)), "unusable name"),
    "line feed in a name": (packed(one("a\n")), "unusable name"),
    "half a surrogate": (packed(one("\ud800")), "unusable name"),
    "metadata of numbers": (packed(one() | {"__metadata__": {"a": 1}}), "__metadata__"),
    "metadata list": (packed(one() | {"__metadata__": ["a"]}), "__metadata__"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_is_refused_with_the_files_name(case: str, tmp_path: Path) -> None:
    data, reason = HOSTILE[case]
    with pytest.raises(InvalidCheckpoint, match=reason) as caught:
        read_checkpoint(write(tmp_path, data))
    message = caught.value.message
    assert f"{tmp_path.name}/model.safetensors" in message and len(message) < 1000
    assert caught.value.param == "model.safetensors"
    message.encode()


def test_the_table_says_where_each_tensor_lies(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "b": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [4, 16]},
        "a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
        "empty": {"dtype": "U8", "shape": [0, 7], "data_offsets": [4, 4]},
    }
    data = bytes(range(16))
    table = read_checkpoint(write(tmp_path, packed(header, data)))
    raw = (tmp_path / "model.safetensors").read_bytes()
    b = table.tensors["b"]
    assert (b.dtype, b.shape, b.file) == ("BF16", (2, 3), "model.safetensors")
    assert raw[b.start : b.end] == data[4:]
    assert table.tensors["empty"].nbytes == 0


def test_a_header_takes_time_in_proportion_to_its_tensors(tmp_path: Path) -> None:
    def seconds(count: int) -> float:
        """The CPU time of this process, without others."""
        folder = tmp_path / str(count)
        folder.mkdir()
        write(folder, packed(many(count), b""))
        start = time.process_time()
        assert len(read_checkpoint(folder).tensors) == count
        return time.process_time() - start

    gc.disable()  # what other tests left would be looked through again and again
    try:
        few = min(seconds(count) for count in (9_999, 10_000, 10_001))
        assert seconds(100_000) < 40 * few, "ten times as many; a step for each pair would be 100"
    finally:
        gc.enable()


def test_too_many_tensors_are_refused_in_a_file_and_over_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "MAX_TENSORS", 2)
    monkeypatch.setattr(headers, "MAX_TENSORS", 2)
    write(tmp_path, packed(two([0, 32], [32, 64])))
    assert len(read_checkpoint(tmp_path).tensors) == 2
    (tmp_path / "mtp.safetensors").write_bytes(packed(one("c")))
    with pytest.raises(InvalidCheckpoint, match="brings the checkpoint over 2 tensors"):
        read_checkpoint(tmp_path)
    write(tmp_path, packed(many(3), b""))
    with pytest.raises(InvalidCheckpoint, match=r"model\.safetensors has 3 tensors, over 2"):
        read_checkpoint(tmp_path)


def test_a_name_in_two_files_is_refused_naming_both(tmp_path: Path) -> None:
    write(tmp_path, packed(one()), mtp=packed(one()))
    with pytest.raises(InvalidCheckpoint, match=r"mtp.safetensors: tensor 'a' is also in model\."):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "reason"),
    [
        ({"a": "model-2.safetensors"}, "'a' should be in 'model-2.safetensors' but is in model"),
        ({"a": "../../x.safetensors"}, "should be in '../../x.safetensors'"),
        ({"a": "model.safetensors", "b": "model.safetensors"}, "'b' should .* is nowhere"),
        ({}, "'a' is in model.safetensors but not in the index"),
        ({"a": 3}, "no weight_map"),
        (["a"], "no weight_map"),
        (None, "no weight_map"),
    ],
)
def test_an_index_that_disagrees_is_refused(
    weight_map: object, reason: str, tmp_path: Path
) -> None:
    write(tmp_path, packed(one()))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    assert read_checkpoint(tmp_path).tensors
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(InvalidCheckpoint, match=reason) as caught:
        read_checkpoint(tmp_path)
    assert caught.value.param == "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (b"[]", "JSON object"),
        (b"{", "malformed JSON"),
        (b"\xff", "malformed JSON"),
        (b"[" * 200_000, "too deeply"),
        (b" " * (MAX_CONFIG_BYTES + 1), "over the limit"),
        (b'{"model_file": "evil.py"}', r"names code to run \(model_file: 'evil.py'\)"),
        (b'{"num_hidden_layers": 1000000000}', "num_hidden_layers = 1000000000"),
        (b'{"text_config": {"hidden_size": -1}}', "hidden_size = -1"),
        (b'{"vocab_size": 1000000000, "text_config": {}}', "vocab_size = 1000000000"),
        (b'{"vocab_size": Infinity}', "vocab_size = inf"),
        (b'{"intermediate_size": [64, 1e12]}', "intermediate_size"),
    ],
)
def test_a_hostile_config_is_refused(config: bytes, reason: str, tmp_path: Path) -> None:
    write(tmp_path, packed(one()), config)
    for read in (read_config, read_checkpoint):
        with pytest.raises(InvalidCheckpoint, match=reason) as caught:
            read(tmp_path)
        assert caught.value.param == "config.json"


@pytest.mark.parametrize("piece", [b"[],", b"{},", b"1,"], ids=["lists", "objects", "numbers"])
def test_json_without_number_is_refused_before_it_is_parsed(piece: bytes, tmp_path: Path) -> None:
    """16 MB of empty lists took a gigabyte and stopped every thread of a node for seconds."""
    bomb = b'{"x":[' + piece * (17 * headers.MAX_TENSORS // len(piece)) + b'0],"y":0}'
    refused = list[str]()
    for name in ("config.json", checkpoint.INDEX_FILE, "model.safetensors"):
        folder = make_checkpoint(tmp_path / name, "qwen3_5")
        content = struct.pack("<Q", len(bomb)) + bomb if name.endswith(".safetensors") else bomb
        _ = (folder / name).write_bytes(content)
        with pytest.raises(InvalidCheckpoint, match="too many") as error:
            _ = read_checkpoint(folder)
        assert name in error.value.message
    _ = (path := tmp_path / "tokenizer_config.json").write_bytes(bomb)
    assert optional_object(path, refused) == {} and "too many" in refused[0]


def test_auto_map_is_not_followed_and_sizes_may_differ_by_layer(tmp_path: Path) -> None:
    config = b'{"auto_map": {"AutoModel": "evil.Model"}, "intermediate_size": [64, 128]}'
    (tmp_path / "evil.py").write_text("raise SystemExit")
    assert read_checkpoint(write(tmp_path, packed(one()), config)).config["auto_map"]


def _dangling(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(folder / "gone")


SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (
        lambda folder: (folder / "config.json").unlink(),
        "config.json is missing. Put the file there",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "holds no model"),
    "a head alone": (
        lambda folder: (folder / "model.safetensors").rename(folder / "mtp.safetensors"),
        "holds no model",
    ),
    "no file's link": (
        _dangling,
        "model.safetensors is a link to a missing file. Put the file there",
    ),
    "a folder": (
        lambda folder: (folder / "model-2.safetensors").mkdir(),
        "model-2.safetensors is not a regular file",
    ),
    "a pipe": (
        lambda folder: os.mkfifo(folder / "model-2.safetensors"),
        "model-2.safetensors is not a regular file",
    ),
    "a bad name": (
        lambda folder: (folder / "model\n.safetensors").write_bytes(packed(one("b"))),
        "unusable name",
    ),
}


@pytest.mark.parametrize(("spoil", "reason"), SPOILED.values(), ids=SPOILED)
def test_a_folder_that_is_no_checkpoint_is_refused(
    spoil: Callable[[Path], object], reason: str, tmp_path: Path
) -> None:
    _ = spoil(write(tmp_path, packed(one())))
    with pytest.raises(InvalidCheckpoint, match=reason):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("mine/llama", r"^llama/model.safetensors has only 4 bytes. Put a whole copy of the file"),
        (
            "hub/models--org--llama/snapshots/5f647d4",
            r"^org/llama/model.safetensors has only 4 bytes. Delete it and download",
        ),
    ],
)
def test_an_error_names_the_model_and_no_folder_of_the_machine(
    folder: str, message: str, tmp_path: Path
) -> None:
    """It reaches clients; and what a person put there cannot be downloaded again."""
    checkpoint = tmp_path / folder
    checkpoint.mkdir(parents=True)
    write(checkpoint, packed(one()))
    (checkpoint / "model.safetensors").write_bytes(b"oops")
    with pytest.raises(InvalidCheckpoint, match=message) as caught:
        read_checkpoint(checkpoint)
    assert str(tmp_path) not in caught.value.message


def test_a_file_that_mlx_wrote_without_metadata_is_read(tmp_path: Path) -> None:
    write(tmp_path, packed(one() | {"__metadata__": None}))
    assert set(read_checkpoint(tmp_path).tensors) == {"a"}


def test_links_into_a_blob_store_are_followed(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    write(blobs, packed(one()))
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    assert set(read_checkpoint(snapshot).tensors) == {"a"}


def test_only_files_that_the_engine_loads_are_read(tmp_path: Path) -> None:
    write(tmp_path, packed(one()), consolidated=packed(one()), model_mtp=packed(one("b")))
    (tmp_path / "model_mtp.safetensors").rename(tmp_path / "model-mtp.safetensors")
    (tmp_path / "mtp").mkdir()
    (tmp_path / "mtp" / "weights.safetensors").write_bytes(packed(one("c")))
    table = read_checkpoint(tmp_path)
    files = {name: tensor.file for name, tensor in table.tensors.items()}
    assert files == {
        "a": "model.safetensors",
        "b": "model-mtp.safetensors",
        "c": "mtp/weights.safetensors",
    }
    assert not is_weight_file("models/a.safetensors")


def test_the_fingerprint_tells_checkpoints_apart_but_not_copies(tmp_path: Path) -> None:
    def fingerprint(name: str, config: bytes, model: bytes, **others: bytes) -> str:
        (tmp_path / name).mkdir()
        return read_checkpoint(write(tmp_path / name, model, config, **others)).fingerprint

    same = fingerprint("1", b"{}", packed(one()))
    assert same == fingerprint("2", b"{}", packed(one()))
    others = {
        fingerprint("3", b"{ }", packed(one())),
        fingerprint("4", b"{}", packed(one(shape=[16]))),
        fingerprint("5", b"{}", packed(one("b"))),
        fingerprint("6", b"{}", packed(one()), mtp=packed(one("m"))),
    }
    assert len(others) == 4 and same not in others

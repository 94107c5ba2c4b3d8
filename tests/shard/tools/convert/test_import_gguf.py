"""Folders made of GGUF files, against the package's own numbers and names of tensors."""

import json
import random
import struct
import sys
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
from disks import small_disk
from gguf_files import ARCHITECTURES, tiny_model, write_model
from models import DEMO
from tokenizers import Tokenizer

from exo_node.placement.errors import InvalidCheckpoint, LoadFailed
from exo_node.shard.checkpoint.gguf_file import GgufFile, GgufTensor, read_gguf
from exo_node.shard.model.open_model import open_model
from exo_node.shard.text.codec import TextCodec
from exo_node.shard.tools.convert import gguf_arrays
from exo_node.shard.tools.convert.gguf_arrays import kept_bits, read_arrays, stored_bytes
from exo_node.shard.tools.convert.import_gguf import import_gguf

Kind = gguf.GGMLQuantizationType
EXACT = (Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0)
K_QUANTS = (Kind.Q4_K, Kind.Q5_K)
ROWS, WIDTH = 6, 512


def random_blocks(kind: Kind) -> "np.ndarray[Any, Any]":
    """Any bytes, but for the scales at the beginning of a block, which are small numbers."""
    generator = np.random.default_rng(kind)
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (ROWS * WIDTH // numbers, size), np.uint8)
    scales = generator.normal(0, 0.01, (len(blocks), 2)).astype(np.float16)
    at = size - 2 if kind == Kind.Q6_K else 0
    count = 2 if kind in (Kind.Q4_1, Kind.Q5_1, *K_QUANTS) else 1
    blocks[:, at : at + 2 * count] = scales[:, :count].copy().view(np.uint8)
    return blocks.reshape(ROWS, -1)


def one_tensor(path: Path, raw: "np.ndarray[Any, Any]", kind: Kind) -> GgufFile:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_gguf(path)


def numbers_of(arrays: dict[str, mx.array], bits: int | None) -> "np.ndarray[Any, Any]":
    if bits is None:
        return np.array(arrays["weight"].astype(mx.float32))
    floats = [arrays[part].astype(mx.float32) for part in ("scales", "biases")]
    return np.array(mx.dequantize(arrays["weight"], *floats, group_size=32, bits=bits))


@pytest.mark.parametrize("kind", [*EXACT, *K_QUANTS, Kind.Q6_K, Kind.Q2_K, Kind.IQ4_NL])
@pytest.mark.parametrize("chunk", [1 << 24, 2 * WIDTH])
def test_numbers_are_those_of_the_package(
    kind: Kind, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_arrays, "_CHUNK", chunk)
    raw = random_blocks(kind)
    file = one_tensor(tmp_path / "w.gguf", raw, kind)
    tensor = file.tensors["w"]
    expected = gguf.dequantize(raw, kind)
    bits = kept_bits(tensor)
    got = numbers_of(read_arrays(file, tensor, bits, 0.0), bits)
    assert got.shape == (ROWS, WIDTH) and stored_bytes(file, tensor) == raw.size
    if kind in EXACT:
        assert np.array_equal(got, expected)
    elif kind in K_QUANTS:  # a scale is a product of 17 bits, and float16 has 11
        assert np.abs(got - expected).max() <= np.abs(expected).max() * 2**-10
        assert bits in (4, 5) and not np.array_equal(got, 0 * got)
    else:
        exact = mx.array(expected).astype(mx.bfloat16).astype(mx.float32)
        assert bits is None and np.array_equal(got, np.array(exact))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_imported_model_computes_what_the_original_does(name: str, tmp_path: Path) -> None:
    model, config = tiny_model(name)
    file = read_gguf(write_model(tmp_path / "m.gguf", name, model, config))
    counts = import_gguf(file, tmp_path / "m")
    imported: Any = open_model(tmp_path / "m")
    imported.set_dtype(mx.float32)
    ids = mx.array([[3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 8, 9, 79]])
    expected = model(ids)
    assert set(counts) == {"16"}
    assert mx.allclose(imported(ids), expected, atol=1e-4 * float(mx.abs(expected).max()))
    assert json.loads((tmp_path / "m" / "config.json").read_text())["model_type"] == name


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q8_0])
def test_a_quantised_file_computes_what_its_numbers_say(
    name: str, kind: Kind, tmp_path: Path
) -> None:
    """Rows that Llama's files have in pairs, too, and stacked experts."""
    model, config = tiny_model(name)
    raw, quantised = tmp_path / "raw.gguf", tmp_path / "q.gguf"
    _ = write_model(quantised, name, model, config, kind=kind)
    rounded = {n: _through(kind, a) for n, a in _parameters(model).items() if n.endswith("weight")}
    model.load_weights(list(rounded.items()), strict=False)
    _ = write_model(raw, name, model, config)
    counts = import_gguf(read_gguf(quantised), tmp_path / "q", shard_bytes=100_000)
    imported: Any = open_model(tmp_path / "q")
    imported.set_dtype(mx.float32)
    ids = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])
    expected = model(ids)
    assert mx.allclose(imported(ids), expected, atol=1e-4 * float(mx.abs(expected).max()))
    assert max(counts, key=lambda bits: counts[bits]) == ("4" if kind == Kind.Q4_0 else "8")
    assert len(list((tmp_path / "q").glob("model-*"))) > 2


def test_all_weights_become_bfloat16_as_requested(tmp_path: Path) -> None:
    model, config = tiny_model("llama")
    file = read_gguf(write_model(tmp_path / "m.gguf", "llama", model, config, kind=Kind.Q4_0))
    assert set(import_gguf(file, tmp_path / "m", dense=True)) == {"16"}
    imported: Any = open_model(tmp_path / "m")
    assert {a.dtype for a in _parameters(imported).values()} == {mx.bfloat16}
    name = "model.layers.0.mlp.up_proj.weight"
    expected = _through(Kind.Q4_0, _parameters(model)[name]).astype(mx.bfloat16)
    assert mx.array_equal(_parameters(imported)[name], expected)


def _parameters(model: Any) -> dict[str, mx.array]:
    from mlx.utils import tree_flatten

    return dict(tree_flatten(model.parameters()))


def _through(kind: Kind, array: mx.array) -> mx.array:
    if array.ndim < 2 or array.shape[-2] == 4:  # routers stay as they are
        return array
    raw = gguf.quantize(np.array(array, np.float32), kind)
    return mx.array(gguf.dequantize(raw, kind))


def test_what_cannot_stay_is_quantised_as_requested(tmp_path: Path) -> None:
    model, config = tiny_model("qwen3_moe")
    file = read_gguf(write_model(tmp_path / "m.gguf", "qwen3_moe", model, config))
    counts = import_gguf(file, tmp_path / "m", 8)
    layers = config["num_hidden_layers"]
    assert counts["16"] == layers and counts["8"] > layers  # the routers keep their precision
    _ = open_model(tmp_path / "m")


def test_the_tokenizer_and_the_ends_are_the_files_own(tmp_path: Path) -> None:
    model, config = tiny_model("qwen3")
    sampling = {"general.sampling.temp": 0.7, "general.sampling.top_p": 0.8}
    file = read_gguf(write_model(tmp_path / "m.gguf", "qwen3", model, config, values=sampling))
    _ = import_gguf(file, tmp_path / "m")
    original = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    imported = Tokenizer.from_file(str(tmp_path / "m" / "tokenizer.json"))
    text = (
        Path(__file__).read_text() + "  Ünï çødé 12345\r\n\r\n\t<|im_start|>user\n日本 🇫🇷<|im_end|>"
    )
    ids = imported.encode(text).ids
    assert ids == original.encode(text).ids
    assert imported.decode(ids, skip_special_tokens=False) == text
    codec = TextCodec.load(tmp_path / "m")
    ends = {imported.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")}
    assert codec.end_tokens == ends
    hello = codec.encode_chat([{"role": "user", "content": "Hello"}])
    assert codec.decode(hello) == "<|im_start|>Hello"
    generation = json.loads((tmp_path / "m" / "generation_config.json").read_text())
    assert generation["temperature"] == 0.7 and generation["top_p"] == 0.8
    assert generation["top_k"] == 40 and generation["do_sample"] is True  # llama.cpp's


def test_a_vocabulary_with_scores_gives_the_merges_of_its_scores(tmp_path: Path) -> None:
    """As SentencePiece applies them: of two neighbours the piece with the best score first."""
    from exo_node.shard.tools.convert.gguf_tokenizer import text_files

    pieces = {"<unk>": 0.0, "<s>": 0.0, "</s>": 0.0, "▁": -9.0, "a": -8.0, "b": -7.0, "c": -6.0}
    pieces |= {"ab": -3.0, "bc": -2.0, "▁a": -5.0, "abc": -1.0, "<0x0A>": 0.0}
    values: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(pieces),
        "tokenizer.ggml.scores": list(pieces.values()),
        "tokenizer.ggml.token_type": [2, 3, 3, *[1] * 8, 6],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    files = text_files(GgufFile(tmp_path / "m.gguf", values, {}, 0))
    tokenizer = Tokenizer.from_str(json.dumps(files["tokenizer.json"]))
    assert tokenizer.encode("abc").tokens == ["<s>", "▁", "abc"]
    assert tokenizer.encode("a\n", add_special_tokens=False).tokens == ["▁a", "<0x0A>"]
    assert tokenizer.decode(tokenizer.encode("abc a").ids) == "abc a"
    assert files["generation_config.json"]["eos_token_id"] == [2]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"general.architecture": "mamba"}, "architecture 'mamba'"),
    ({"general.architecture": "mixtral"}, "architecture 'mixtral'"),
    ({"llama.attention.logit_softcap": 30.0}, "logit_softcap = 30.0"),
    ({"llama.rope.scaling.type": "longrope"}, "longrope"),
    ({"llama.rope.dimension_count": 8}, "rope.dimension_count = 8"),
    ({"llama.attention.head_count_kv": [1, 2]}, "head_count_kv"),
    ({"llama.block_count": -1}, "block_count = -1"),
    ({"llama.attention.layer_norm_rms_epsilon": "x"}, "layer_norm_rms_epsilon = 'x'"),
    ({"split.count": 3}, "one of 3 parts"),
    *[({"split.count": n}, f"one of {n!r} parts") for n in ("x", "", [], [1], 1e300, -1)],
    ({"llama.attention.head_count": 0}, "head_count = 0"),
    ({"general.architecture": "gemma3", "gemma3.attention.head_count": 0}, "head_count = 0"),
    ({"tokenizer.ggml.pre": "unheard-of"}, "tokenizer.ggml.pre = 'unheard-of'"),
    ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model = 'bert'"),
    ({"tokenizer.ggml.eos_token_id": 1 << 31}, "eos_token_id"),
    ({"tokenizer.ggml.tokens": ["a", "a"]}, "token types"),
    ({"tokenizer.ggml.merges": ["a b c"]}, "merge"),
]


@pytest.mark.parametrize(("changes", "reason"), REFUSED)
def test_what_is_not_known_is_refused_by_name_and_leaves_nothing(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    model, config = tiny_model("llama")
    file = read_gguf(write_model(tmp_path / "m.gguf", "llama", model, config))
    changed = GgufFile(file.path, {**file.values, **changes}, file.tensors, file.size)
    with pytest.raises(InvalidCheckpoint) as error:
        _ = import_gguf(changed, tmp_path / "m")
    assert reason in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_tensors_that_do_not_fit_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    model, config = tiny_model("llama")
    file = read_gguf(write_model(tmp_path / "m.gguf", "llama", model, config))
    tensors = dict(file.tensors)
    norm = tensors["blk.0.attn_norm.weight"]
    factors = GgufTensor("rope_freqs.weight", 0, (config["head_dim"] // 2,), file.size - 4)
    cases: dict[str, dict[str, Any]] = {
        "blk.0.ssm_in.weight": {**tensors, "blk.0.ssm_in.weight": norm},
        "Missing": {n: t for n, t in tensors.items() if n != norm.name},
        factors.name: {**tensors, factors.name: factors},
        "shape": {n: norm if n == "output_norm.weight" else t for n, t in tensors.items()},
    }
    for reason, changed in cases.items():
        with pytest.raises(InvalidCheckpoint) as error:
            _ = import_gguf(GgufFile(file.path, file.values, changed, file.size), tmp_path / "m")
        assert reason in str(error.value) or "overlaps" in str(error.value)
        assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_damaged_and_hostile_files_are_refused_in_words(tmp_path: Path) -> None:
    """Cut anywhere, with any bytes changed, and with counts and sizes of any amount."""
    model, config = tiny_model("qwen3")
    whole = write_model(tmp_path / "m.gguf", "qwen3", model, config).read_bytes()
    header = whole.index(b"blk.0.") + 4000
    draw = random.Random(1)
    huge = [struct.pack("<Q", n) for n in (1 << 20, 1 << 31, 1 << 40, (1 << 64) - 1)]
    refused = 0
    for step in range(400):
        data = bytearray(whole)
        match step % 3:
            case 0:
                data = data[: draw.randrange(header if step % 2 else len(data))]
            case 1:
                at = draw.randrange(4, 200) if step % 2 else draw.randrange(4, header)
                data[at : at + 8] = draw.choice(huge)
            case _:
                for _ in range(3):
                    data[draw.randrange(header)] = draw.randrange(256)
        path = tmp_path / "bad.gguf"
        _ = path.write_bytes(data)
        try:
            _ = import_gguf(read_gguf(path), tmp_path / "m")
        except InvalidCheckpoint as error:
            refused += 1
            assert len(error.message) < 2000
        except LoadFailed:
            pytest.fail("the package is installed")
        else:
            import shutil

            shutil.rmtree(tmp_path / "m")
        assert {path.name for path in tmp_path.iterdir()} == {"m.gguf", "bad.gguf"}
    assert refused > 200


def test_a_kind_that_needs_the_package_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = one_tensor(tmp_path / "w.gguf", random_blocks(Kind.Q6_K), Kind.Q6_K)
    own = one_tensor(tmp_path / "o.gguf", random_blocks(Kind.Q4_K), Kind.Q4_K)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(LoadFailed, match=r"exo-node\[gguf\]"):
        _ = stored_bytes(file, file.tensors["w"])
    assert stored_bytes(own, own.tensors["w"]) > 0


@pytest.mark.parametrize("way", ["written", "replaced", "longer"])
def test_a_file_that_changes_meanwhile_is_refused_and_leaves_nothing(
    tmp_path: Path, way: str
) -> None:
    """A download that allocates its file first would become a model of zeros."""
    file = read_gguf(write_model(tmp_path / "m.gguf", "qwen3", *tiny_model("qwen3")))
    content = file.path.read_bytes()

    def change(*_: object) -> None:
        if way == "replaced":
            assert (tmp_path / "new").write_bytes(content)
            (tmp_path / "new").replace(file.path)
            return
        with file.path.open("r+b" if way == "written" else "ab") as opened:
            assert opened.write(content[:100])

    with pytest.raises(InvalidCheckpoint, match="changed while it was read"):
        _ = import_gguf(file, tmp_path / "m", report=change)
    assert [each.name for each in tmp_path.iterdir()] == ["m.gguf"]


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, config = tiny_model("llama")
    file = read_gguf(write_model(tmp_path / "m.gguf", "llama", model, config))
    disk = tmp_path / "disk"
    with small_disk(disk, "1m"):
        with pytest.raises(OSError, match="the disk has"):
            _ = import_gguf(file, disk / "m")
        assert list(disk.iterdir()) == []
        monkeypatch.setattr("exo_node.shard.tools.convert.import_gguf._require_room", _room)
        with pytest.raises(OSError, match="model-00001"):
            _ = import_gguf(file, disk / "m")
        assert list(disk.iterdir()) == []


def _room(_folder: Path, _size: int) -> None:
    """Another program fills the disk meanwhile."""

"""Files that a model need not have, each with each fault: the model loads, and the file is named.

Templates are rendered from the source that capabilities are read in.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from embedders import encoder
from engines import DEMO, load_quietly, spec
from small import LAYERS, small_checkpoint

from exo_node.placement.errors import InvalidCheckpoint, InvalidRequest
from exo_node.shard.checkpoint.chat_format import capabilities
from exo_node.shard.checkpoint.checkpoint import read_config
from exo_node.shard.text.codec import TextCodec

USER = [{"role": "user", "content": "hello"}]
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {}}}
PLAIN = "{% for m in messages %}{{ m.content }}|{% endfor %}"
TOOLS = "{#<tool_call>#}{% for t in tools or [] %}{{ t.function.name }}:{% endfor %}" + PLAIN
TEMPLATE = (DEMO / "chat_template.jinja").read_text()
Spoil = Callable[[Path], object]


def text_files(folder: Path, **settings: Any) -> Path:
    """The demo's tokenizer, its template in tokenizer_config.json, and nothing optional."""
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(DEMO / name, folder)
    config = json.loads((DEMO / "tokenizer_config.json").read_text())
    config = {**config, "chat_template": TEMPLATE, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def prompt(codec: TextCodec, *tools: dict[str, Any]) -> str:
    return codec.decode(codec.encode_chat(USER, tools=tools))


def spoiled(content: bytes) -> Spoil:
    return lambda path: path.write_bytes(content)


def huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 30)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


SPOILS: dict[str, Spoil] = {
    "empty": spoiled(b""),
    "cut": spoiled(b'{"chat_template": "'),
    "not UTF-8": spoiled(b'{"a": "\xff"}'),
    "UTF-16 without a mark": spoiled("{{ messages }}".encode("utf-16-le") + b"\xff"),
    "null": spoiled(b"null"),
    "null within": spoiled(b'{"chat_template": null, "eos_token": null, "a": null}'),
    "another type": spoiled(b'[{"chat_template": 7}]'),
    "another type within": spoiled(b'{"chat_template": 7, "eos_token": 7, "eos_token_id": "x"}'),
    "huge": huge,
    "a folder": lambda path: path.mkdir(parents=True),
    "a pipe": os.mkfifo,
}
OPTIONAL = (
    *("generation_config.json", "chat_template.json", "processor_config.json"),
    *("preprocessor_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "additional_chat_templates/tool_use.jinja"),
)
HARMLESS = {
    *(("preprocessor_config.json", spoil) for spoil in SPOILS),
    *((name, "null within") for name in OPTIONAL[:3]),
    *((name, "empty") for name in OPTIONAL if name.endswith(".jinja")),
}
"""What is no fault of a text model, or says nothing."""
NOT_TEXT = ("empty", "not UTF-8", "UTF-16 without a mark", "huge", "a folder", "a pipe")
"""Faults of a template, which may be any text."""


TRIED = OPTIONAL[:3]
SOME = ("cut", "another type", "a pipe")
"""For files that are read as those are."""


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        (name, spoil)
        for name in OPTIONAL
        for spoil in (NOT_TEXT if name.endswith(".jinja") else SPOILS if name in TRIED else SOME)
    ],
)
def test_an_optional_file_refuses_no_model(
    tmp_path: Path, name: str, spoil: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = text_files(tmp_path / "m")
    (folder / name).parent.mkdir(exist_ok=True)
    _ = SPOILS[spoil](folder / name)
    codec = TextCodec.load(folder)
    assert prompt(codec).endswith("hello<|im_end|>\n<|im_start|>assistant\n")
    assert codec.end_tokens
    notes: list[str] = []
    _ = capabilities(folder, notes)
    assert (name.rpartition("/")[2] in caplog.text) == ((name, spoil) not in HARMLESS)
    assert set(notes) <= {record.getMessage() for record in caplog.records}


ENDLESS = ("huge", "a pipe", "endless")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("spoil", ENDLESS)
def test_a_needed_file_without_an_end_is_refused(tmp_path: Path, name: str, spoil: str) -> None:
    folder = text_files(tmp_path / "m")
    (folder / name).unlink()
    _ = {**SPOILS, "endless": endless}[spoil](folder / name)
    with pytest.raises(InvalidCheckpoint, match=name):
        _ = TextCodec.load(folder)


@pytest.mark.parametrize("family", ["bert", "xlm_roberta"])
def test_a_folder_without_tokens_for_text_is_refused(tmp_path: Path, family: str) -> None:
    """transformers makes a tokenizer of control tokens alone for it."""
    _ = shutil.copy(encoder(family) / "config.json", tmp_path)
    with pytest.raises(InvalidCheckpoint, match="no tokens for text") as refused:
        _ = TextCodec.load(tmp_path)
    assert refused.value.param == "tokenizer.json"


SOURCES = {
    "chat_template.jinja": PLAIN,
    "chat_template.json": json.dumps({"chat_template": PLAIN}),
    "processor_config.json": json.dumps({"chat_template": PLAIN, "processor_class": "X"}),
}


@pytest.mark.parametrize("number", range(len(SOURCES)))
@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "marked"])
def test_a_template_is_that_of_the_first_file_that_has_one(
    tmp_path: Path, number: int, mark: str
) -> None:
    """Each is tried before the later ones, which have another; a mark stays out of prompts."""
    folder = text_files(tmp_path / "m", chat_template="{{ 'wrong' }}{# tools #}")
    names = list(SOURCES)
    _ = (folder / names[number]).write_text(mark + SOURCES[names[number]])
    for later in names[number + 1 :]:
        _ = (folder / later).write_text(json.dumps({"chat_template": "{{ 'wrong' }}"}))
    assert prompt(TextCodec.load(folder)) == "hello|"
    assert capabilities(folder) == ()


@pytest.mark.parametrize(
    ("named", "plain", "with_tools"),
    [
        ({"default": PLAIN, "tool_use": TOOLS}, "hello|", "f:hello|"),
        ({"tool_use": TOOLS}, "hello|", "f:hello|"),
        ({"rag": TOOLS}, "hello|", "f:hello|"),
        ({"default": PLAIN, "rag": TOOLS}, "hello|", "hello|"),
        ({"default": "", "tool_use": TOOLS, "x": 7}, "hello|", "f:hello|"),
    ],
    ids=["both", "no default", "neither", "another", "empty"],
)
@pytest.mark.parametrize("form", ["list", "object", "files"])
def test_named_templates_are_rendered_and_described_alike(
    tmp_path: Path, named: dict[str, Any], plain: str, with_tools: str, form: str
) -> None:
    value: Any = named
    if form == "list":
        value = [{"name": name, "template": text} for name, text in named.items()]
    if form == "files":
        value = {name: text for name, text in named.items() if name != "tool_use"}
    folder = text_files(tmp_path / "m", chat_template=value)
    if form == "files" and "tool_use" in named:
        extra = folder / "additional_chat_templates"
        extra.mkdir()
        _ = (extra / "tool_use.jinja").write_text(named["tool_use"])
    codec = TextCodec.load(folder)
    assert prompt(codec) == plain
    assert prompt(codec, TOOL) == with_tools
    assert ("tools" in capabilities(folder)) == (with_tools != plain)


def test_the_call_format_is_that_of_the_template_with_tools(tmp_path: Path) -> None:
    calls = TOOLS + "{# <tool_call>\n<function= #}"
    named = {"default": PLAIN, "tool_use": calls}
    codec = TextCodec.load(text_files(tmp_path / "m", chat_template=named))
    assert codec.answer_format.call_format == "qwen3_coder"


def test_line_ends_in_a_template_are_read_as_text_files_are(tmp_path: Path) -> None:
    folder = text_files(tmp_path / "m")
    _ = (folder / "chat_template.jinja").write_bytes(b"a\r\nb\rc\n{{ messages[0].content }}")
    assert prompt(TextCodec.load(folder)) == "a\nb\nc\nhello"


def test_a_chat_without_a_readable_template_is_told_which_file_is_at_fault(tmp_path: Path) -> None:
    folder = text_files(tmp_path / "m", chat_template=None)
    _ = (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(InvalidRequest, match=r"chat_template\.jinja is not UTF-8"):
        _ = prompt(TextCodec.load(folder))


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("slip", ["mark", "comma"])
def test_a_slip_in_a_file_that_is_needed_does_no_harm(tmp_path: Path, name: str, slip: str) -> None:
    folder = text_files(tmp_path / "m")
    text = (folder / name).read_text().rstrip()
    changed = "\ufeff" + text if slip == "mark" else text.removesuffix("}") + ", }"
    _ = (folder / name).write_text(changed)
    assert prompt(TextCodec.load(folder)).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("value", [4095.0, "4095", False, {}, [4095, None], [4095.0], [[1]]])
def test_an_end_token_of_the_config_that_is_no_id_is_named(tmp_path: Path, value: object) -> None:
    folder = text_files(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": value}
    _ = (folder / "config.json").write_text(json.dumps(config))
    for load in (read_config, TextCodec.load):
        with pytest.raises(InvalidCheckpoint, match="has eos_token_id = ") as refused:
            _ = load(folder)
        assert refused.value.param == "config.json"


@pytest.mark.parametrize(
    "fields",
    [
        {"bos_token_id": "1", "pad_token_id": 1.5, "tie_word_embeddings": "yes"},
        {"auto_map": 7, "transformers_version": 7, "rope_scaling": 7, "torch_dtype": 7},
        {"id2label": 7, "architectures": 7, "tokenizer_class": 7, "text_config": {"model_type": 7}},
    ],
)
def test_a_tokenizer_needs_nothing_else_of_the_config(
    tmp_path: Path, fields: dict[str, object]
) -> None:
    folder = text_files(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text()) | fields
    _ = (folder / "config.json").write_text(json.dumps(config))
    _ = TextCodec.load(folder)


GENERATION: dict[str, Spoil] = {
    "comma": spoiled(b'{"eos_token_id": 4095, "temperature": 0.3,}'),
    "a list": spoiled(b"[1]"),
    "ids and null": spoiled(b'{"eos_token_id": [4095, null]}'),
    "an object": spoiled(b'{"eos_token_id": {}}'),
    "not UTF-8": spoiled(b"\xff"),
    "a pipe": os.mkfifo,
}


@pytest.mark.parametrize("fault", GENERATION)
def test_a_model_loads_beside_any_generation_config(tmp_path: Path, fault: str) -> None:
    folder, spoil = tmp_path / "m", GENERATION[fault]
    sampling = {"temperature": 0.3} if fault == "comma" else {}
    shutil.copytree(small_checkpoint(), folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    _ = spoil(folder / "generation_config.json")
    loaded = load_quietly(spec(folder, 0, LAYERS, num_layers=LAYERS))
    assert loaded.codec is not None
    assert 4095 in loaded.codec.end_tokens
    assert loaded.codec.published_sampling == sampling

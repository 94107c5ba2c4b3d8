"""The abilities of chat templates, from the files of a checkpoint."""

import json
import shutil
from pathlib import Path

import pytest

from exo_node.shard.checkpoint.chat_format import capabilities

ROOT = Path(__file__).parents[3]
TEMPLATES = ROOT / "tests" / "templates"
PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "abilities"),
    [
        ("qwen", {"thinking", "thinking_toggle", "tools"}),
        ("glm", {"thinking", "thinking_toggle", "tools"}),
        ("deepseek", {"thinking", "thinking_toggle", "tools"}),
        ("gpt_oss", {"thinking", "tools"}),
    ],
)
def test_a_templates_text_says_what_it_can(
    tmp_path: Path, template: str, abilities: set[str]
) -> None:
    shutil.copy(TEMPLATES / f"{template}.jinja", tmp_path / "chat_template.jinja")
    _ = (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": PLAIN}))
    assert set(capabilities(tmp_path)) == abilities


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.json"])
def test_a_template_within_json_is_read_alone_or_in_a_list(tmp_path: Path, name: str) -> None:
    _ = (tmp_path / name).write_text(json.dumps({"chat_template": "{% if tools %}"}))
    assert capabilities(tmp_path) == ("tools",)
    named = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": "{{tools}}"}]
    _ = (tmp_path / name).write_text(json.dumps({"chat_template": named}))
    assert capabilities(tmp_path) == ("tools",)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"chat_template": 7}', "\udcff", "[" * 10**5])
def test_files_that_hold_no_template_have_no_abilities(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer_config.json"
    _ = path.write_bytes(content.encode(errors="surrogateescape"))
    assert capabilities(tmp_path) == ()
    path.unlink()
    assert capabilities(tmp_path) == ()


def test_the_demo_has_neither_tools_nor_thinking() -> None:
    assert capabilities(ROOT / "shard" / "models" / "demo") == ()

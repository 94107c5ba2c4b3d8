"""The abilities of chat templates, from the files of a checkpoint."""

import json
import shutil
from pathlib import Path

import pytest
from call_spellings import MARKS

from exo_node.shard.checkpoint.chat_format import capabilities, reads_calls

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
    _ = (tmp_path / name).write_text(json.dumps({"chat_template": "{% if tools %}<tool_call>"}))
    assert capabilities(tmp_path) == ("tools",)
    named = [
        {"name": "default", "template": PLAIN},
        {"name": "tool_use", "template": "{{tools}}<tool_call>"},
    ]
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


READ = (
    """{% if tools %}Respond with {"name": function name, "parameters": {}}.{% endif %}""",
    '{{ tools }} \'{"name": "\' + call.name + \'", "arguments": \' + call.arguments',
)
UNREAD = (
    '{{ tools }} Action: ```json [{"tool_name": "", "parameters": {}}]```',
    '{{ tools }}<tool_calls>[{"name": "", "arguments": {}}]</tool_calls>',
    "{{ tools }}<|START_ACTION|>",
    "{{ tools }}",
)


@pytest.mark.parametrize("template", READ + UNREAD)
def test_tools_are_offered_only_where_something_reads_the_calls(
    tmp_path: Path, template: str
) -> None:
    notes: list[str] = []
    _ = (tmp_path / "chat_template.jinja").write_text(template)
    assert capabilities(tmp_path, notes) == (("tools",) if template in READ else ())
    assert ["no tools" in note for note in notes] == ([] if template in READ else [True])


@pytest.mark.parametrize("mark", [*MARKS.values(), "<|channel|>commentary to=functions.f<|call|>"])
def test_a_template_with_the_marks_of_a_format_that_is_read_offers_tools(mark: str) -> None:
    assert reads_calls(f"{{{{ tools }}}}{mark}")

"""The table of coding tools, and that docs/clients.md has the same settings."""

import json
import shlex
import tomllib
from pathlib import Path
from typing import Any, cast

import pytest

from exo_node.node.cli.coding_tools import KEY, TOOLS, Invocation, ServedModel, shell_lines

PAGE = (Path(__file__).parents[3] / "docs" / "clients.md").read_text()
SERVED = ServedModel("http://localhost:52415", "Qwen/Qwen3.6-27B", 65536)
FOLDER = Path("/data/launch")


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def block(title: str, language: str) -> str:
    """The first block of a section in that language."""
    return section(title).partition(f"```{language}\n")[2].partition("\n```")[0]


def command_of(title: str) -> Invocation:
    """The variables and arguments of a section's shell lines."""
    words = shlex.split(block(title, "sh").replace("\\\n", " "))
    environment = dict(word.split("=", 1) for word in words if word.partition("=")[0].isupper())
    return Invocation(environment, tuple(words[len(environment) + 1 :]))


def invocation(command: str, served: ServedModel = SERVED) -> Invocation:
    return TOOLS[command].invocation(served, FOLDER)


def without(arguments: tuple[str, ...], flag: str) -> tuple[str, ...]:
    at = arguments.index(flag)
    return (*arguments[:at], *arguments[at + 2 :])


def flat(value: Any, prefix: str = "") -> dict[str, object]:
    """`{"a.b": 1}` of `{"a": {"b": 1}}`."""
    if not isinstance(value, dict):
        return {prefix: value}
    inner = cast("dict[str, Any]", value)
    dotted = f"{prefix}." if prefix else ""
    return {k: v for name, each in inner.items() for k, v in flat(each, dotted + name).items()}


def test_the_page_lists_the_tools_with_the_least_context_of_each() -> None:
    rows = [line.split("|")[1:-1] for line in section("Coding tools").splitlines() if "|" in line]
    listed = {row[0].strip(): (row[1].strip(), row[3].strip()) for row in rows[2:]}
    assert listed == {
        f"`{name}`": (tool.title, f"{tool.least_context:,}") for name, tool in TOOLS.items()
    }


def test_claude_code_has_the_pages_variables_and_repeats_them_as_settings() -> None:
    launched = invocation("claude")
    variables = {name: text for name, text in launched.environment.items() if text}
    assert variables == command_of("Claude Code").environment
    flag, settings = launched.arguments
    repeated = json.loads(settings)["env"]
    assert (flag, repeated) == (
        "--settings",
        {n: t for n, t in launched.environment.items() if n != "ANTHROPIC_AUTH_TOKEN"},
    )
    assert repeated["CLAUDE_CODE_USE_BEDROCK"] == repeated["ANTHROPIC_API_KEY"] == ""


@pytest.mark.parametrize("key", [None, "secret"])
def test_codex_has_the_pages_values(key: str | None) -> None:
    launched = invocation("codex", ServedModel(SERVED.url, SERVED.model, SERVED.context, key))
    values = "\n".join(launched.arguments[1::2])
    assert set(launched.arguments[::2]) == {"-c"}
    page = flat(tomllib.loads(block("Codex", "toml")))
    if key is not None:
        page["model_providers.exo.env_key"] = "EXO_API_KEY"
        assert '`env_key = "EXO_API_KEY"`' in section("Codex")
    assert flat(tomllib.loads(values)) == page
    assert launched.environment == ({} if key is None else {"EXO_API_KEY": key})


def test_opencode_has_the_pages_configuration() -> None:
    content = invocation("opencode").environment["OPENCODE_CONFIG_CONTENT"]
    assert json.loads(content) == json.loads(block("opencode", "json"))


def test_copilot_has_the_pages_variables_and_no_other_provider() -> None:
    launched = invocation("copilot")
    shown = {name: text for name, text in launched.environment.items() if text}
    assert shown == command_of("GitHub Copilot CLI").environment
    assert launched.environment["COPILOT_PROVIDER_BEARER_TOKEN"] == ""
    assert launched.arguments == ()
    tokens = [int(shown[f"COPILOT_PROVIDER_MAX_{kind}_TOKENS"]) for kind in ("PROMPT", "OUTPUT")]
    assert sum(tokens) == SERVED.context


@pytest.mark.parametrize(
    ("command", "file_in"),
    [("qwen", "QWEN_CODE_SYSTEM_DEFAULTS_PATH"), ("aider", "--model-metadata-file")],
)
def test_a_tool_that_reads_only_a_file_gets_the_pages_in_one_of_exo_nodes_own(
    command: str, file_in: str
) -> None:
    launched, page = invocation(command), command_of(TOOLS[command].title)
    [(file, content)] = launched.files.items()
    assert file.parent == FOLDER
    assert json.loads(content) == json.loads(block(TOOLS[command].title, "json"))
    environment, arguments = dict(launched.environment), launched.arguments
    if file_in.startswith("--"):
        assert arguments[arguments.index(file_in) + 1] == str(file)
        arguments = without(arguments, file_in)
    else:
        assert environment.pop(file_in) == str(file)
    assert (environment, sorted(arguments)) == (page.environment, sorted(page.arguments))


def test_files_of_different_models_have_different_names() -> None:
    other = ServedModel(SERVED.url, "other", 32768)
    for command in ("qwen", "aider"):
        assert not invocation(command).files.keys() & invocation(command, other).files.keys()


@pytest.mark.parametrize("command", TOOLS)
def test_a_key_is_in_variables_alone_and_appears_nowhere_in_what_is_printed(command: str) -> None:
    keyed = ServedModel(SERVED.url, SERVED.model, SERVED.context, "s3cret-key")
    launched = invocation(command, keyed)
    assert "s3cret-key" in launched.environment.values()
    assert not any("s3cret-key" in text for text in (*launched.arguments, *launched.files.values()))
    assert "s3cret-key" not in f"{keyed!r} {launched!r}"
    shown = ServedModel(SERVED.url, SERVED.model, SERVED.context, KEY)
    assert '="$EXO_API_KEY"' in shell_lines(command, invocation(command, shown))


def test_the_longest_answer_is_a_quarter_of_a_short_context() -> None:
    assert ServedModel("", "m", 16384).longest_answer == 4096
    assert ServedModel("", "m", 131072).longest_answer == 8192

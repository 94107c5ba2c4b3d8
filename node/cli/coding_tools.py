"""The coding tools that `exo-node launch` starts, and how each is set up for a node. Pure.

A tool is one entry of TOOLS and one function, which returns its invocation. Where a tool takes
variables or flags they are used; where it takes nothing but a file, that file is one of exo-node's
own, named after its content. A user's files are neither read nor written. The recipes of
docs/clients.md have the same facts; a test compares them.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from shlex import quote
from typing import Final

KEY: Final = "$EXO_API_KEY"
"""The key in an invocation that is printed: the shell replaces it."""
_LONGEST_ANSWER: Final = 8192
_UV: Final = "uv tool install --python python3.12"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model, and the address and key of the node that serves it.

    `context` is in tokens. `key` is None where the node asks for none.
    """

    url: str
    model: str
    context: int
    key: str | None = field(default=None, repr=False)

    @property
    def some_key(self) -> str:
        """A key for tools that insist on one."""
        return self.key or "any"

    @property
    def longest_answer(self) -> int:
        return min(_LONGEST_ANSWER, self.context // 4)


@dataclass(frozen=True, slots=True)
class Invocation:
    """The variables and arguments that a tool is started with, and files that exist by then."""

    environment: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    arguments: tuple[str, ...] = ()
    files: Mapping[Path, str] = field(default_factory=dict[Path, str])


@dataclass(frozen=True, slots=True)
class CodingTool:
    """A coding tool.

    `title` is its heading in docs/clients.md. `least_context` has room for its first request, which
    that page gives as measured, and for an answer. `calls`: whether it works by calling tools.
    """

    command: str
    title: str
    install: str
    least_context: int
    invocation: Callable[[ServedModel, Path], Invocation]
    calls: bool = True


def _claude(served: ServedModel, _: Path) -> Invocation:
    """Its settings files may set the same variables, and would win without `--settings`."""
    hosted = ("BEDROCK", "VERTEX", "FOUNDRY")
    models = ("", "DEFAULT_OPUS_", "DEFAULT_SONNET_", "DEFAULT_HAIKU_")
    variables = {
        "ANTHROPIC_BASE_URL": served.url,
        **{f"ANTHROPIC_{name}MODEL": served.model for name in models},
        "CLAUDE_CODE_SUBAGENT_MODEL": served.model,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(served.context),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(served.longest_answer),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "ANTHROPIC_API_KEY": "",
        **{f"CLAUDE_CODE_USE_{name}": "" for name in hosted},
    }
    environment = {**variables, "ANTHROPIC_AUTH_TOKEN": served.some_key}
    return Invocation(environment, ("--settings", _json({"env": variables})))


def _codex(served: ServedModel, _: Path) -> Invocation:
    provider = {"name": "exo-node", "base_url": f"{served.url}/v1", "wire_api": "responses"}
    if served.key is not None:
        provider["env_key"] = "EXO_API_KEY"
    values = {
        "model": served.model,
        "model_provider": "exo",
        "model_context_window": served.context,
        **{f"model_providers.exo.{name}": value for name, value in provider.items()},
    }
    # A string or number in JSON is one in TOML too.
    flags = (part for name, value in values.items() for part in ("-c", f"{name}={_json(value)}"))
    return Invocation(_key_variable(served), tuple(flags))


def _opencode(served: ServedModel, _: Path) -> Invocation:
    limit = {"context": served.context, "output": served.longest_answer}
    key = "any" if served.key is None else "{env:EXO_API_KEY}"
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "exo-node",
        "options": {"baseURL": f"{served.url}/v1", "apiKey": key},
        "models": {served.model: {"limit": limit}},
    }
    config = {
        "$schema": "https://opencode.ai/config.json",
        "model": f"exo/{served.model}",
        "provider": {"exo": provider},
    }
    content = {"OPENCODE_CONFIG_CONTENT": _json(config)}
    return Invocation({**content, **_key_variable(served)})


def _qwen(served: ServedModel, folder: Path) -> Invocation:
    """It takes the context from settings only; these are the least of them, below the user's."""
    settings = {"model": {"generationConfig": {"contextWindowSize": served.context}}}
    file, content = _own_file(folder, "qwen", settings)
    return Invocation(
        {"OPENAI_API_KEY": served.some_key, "QWEN_CODE_SYSTEM_DEFAULTS_PATH": str(file)},
        (
            *("--auth-type", "openai"),
            *("--openai-base-url", f"{served.url}/v1"),
            *("--model", served.model),
        ),
        {file: content},
    )


def _copilot(served: ServedModel, _: Path) -> Invocation:
    """Offline, so that it asks neither for a login nor for models of its own service."""
    others = ("BEARER_TOKEN", "API_KEY_COMMAND", "HEADERS", "MODEL_ID", "WIRE_MODEL")
    provider = {
        "TYPE": "openai",
        "WIRE_API": "completions",
        "BASE_URL": f"{served.url}/v1",
        "API_KEY": served.some_key,
        "MAX_PROMPT_TOKENS": str(served.context - served.longest_answer),
        "MAX_OUTPUT_TOKENS": str(served.longest_answer),
        **dict.fromkeys(others, ""),
    }
    variables = {f"COPILOT_PROVIDER_{name}": value for name, value in provider.items()}
    return Invocation({"COPILOT_OFFLINE": "true", "COPILOT_MODEL": served.model, **variables})


def _aider(served: ServedModel, folder: Path) -> Invocation:
    model = f"openai/{served.model}"
    facts = {
        "max_input_tokens": served.context,
        "max_output_tokens": served.longest_answer,
        "litellm_provider": "openai",
        "mode": "chat",
    }
    file, content = _own_file(folder, "aider", {model: facts})
    return Invocation(
        {"OPENAI_API_KEY": served.some_key},
        (
            *("--model", model),
            *("--openai-api-base", f"{served.url}/v1"),
            *("--model-metadata-file", str(file)),
            "--no-show-model-warnings",
        ),
        {file: content},
    )


def _npm(package: str, least_node: int | None = None) -> str:
    needs = "" if least_node is None else f"; it needs Node.js {least_node} or newer"
    return f"npm install -g {package}@latest{needs}"


TOOLS: Final[Mapping[str, CodingTool]] = {
    tool.command: tool
    for tool in (
        CodingTool("claude", "Claude Code", _npm("@anthropic-ai/claude-code", 22), 32_768, _claude),
        CodingTool("codex", "Codex", _npm("@openai/codex"), 16_384, _codex),
        CodingTool("opencode", "opencode", _npm("opencode-ai"), 16_384, _opencode),
        CodingTool("qwen", "Qwen Code", _npm("@qwen-code/qwen-code", 22), 32_768, _qwen),
        CodingTool("copilot", "GitHub Copilot CLI", _npm("@github/copilot", 22), 32_768, _copilot),
        CodingTool("aider", "aider", f"{_UV} aider-chat", 4096, _aider, calls=False),
    )
}
"""The tools by their commands. `least_context` follows the table in docs/clients.md."""


def shell_lines(command: str, invocation: Invocation, arguments: tuple[str, ...] = ()) -> str:
    """The invocation as text for a POSIX shell: its files first, then one command."""
    lines = [line for path, text in invocation.files.items() for line in _writing(path, text)]
    variables = [f"{name}={_quoted(value)}" for name, value in invocation.environment.items()]
    words = [quote(word) for word in (command, *invocation.arguments, *arguments)]
    return "\n".join([*lines, " \\\n".join([*variables, " ".join(words)])])


def _writing(path: Path, text: str) -> tuple[str, ...]:
    target = quote(str(path))
    return f"mkdir -p {quote(str(path.parent))}", f"printf '%s' {quote(text)} > {target}"


def _quoted(value: str) -> str:
    return f'"{KEY}"' if value == KEY else quote(value)


def _own_file(folder: Path, name: str, value: object) -> tuple[Path, str]:
    """A file whose name depends on its content, so that two launches do not change each other's."""
    content = _json(value)
    return folder / f"{name}-{sha256(content.encode()).hexdigest()[:12]}.json", content


def _key_variable(served: ServedModel) -> dict[str, str]:
    return {} if served.key is None else {"EXO_API_KEY": served.key}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)

"""The grammar of a call that a request insists on, in the format of a model's own calls."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from ...placement.errors import InvalidRequest
from .answer_format import DEEPSEEK, DEEPSEEK_CALL, HARMONY, call_markers, is_deepseek, is_harmony
from .grammars import SPACES

FIELD: Final = "tool_choice"
_MOST_CALLS: Final = 16
_DEFINITIONS: Final = ("$defs", "definitions")
_LINE: Final = '"\\n"'
Tool = Mapping[str, Any]


def call_grammar(tokenizer: Any, asked: str, tools: Sequence[Tool]) -> str:
    """In Lark. `tokenizer` is mlx-lm's wrapper; `asked` is JSON: the `names` that may be called
    (null: any), and whether calls may be `parallel`.

    Raises InvalidRequest.
    """
    wanted: dict[str, Any] = json.loads(asked)
    names: list[str] | None = wanted["names"]
    declared = [tool["function"] for tool in tools]
    chosen = [tool for tool in declared if names is None or tool["name"] in names]
    if not chosen:
        raise InvalidRequest(f"'{FIELD}' insists on a tool that is not declared", param=FIELD)
    words, parallel = _Words(tokenizer), bool(wanted["parallel"])
    match _format(tokenizer):
        case "Harmony":
            return _harmony_calls(chosen, words)
        case "DeepSeek":
            # What V3 and R1 write stands in their templates too; V3.1 writes less.
            fenced = "```json" in str(getattr(tokenizer, "chat_template", None))
            return _deepseek_calls(chosen, words, parallel=parallel, fenced=fenced)
        case "json_tools":
            calls = [_json_call(number, tool) for number, tool in enumerate(chosen)]
        case "qwen3_coder":
            calls = [_tagged_call(number, tool, words) for number, tool in enumerate(chosen)]
        case "glm47":
            calls = [_keyed_call(number, tool, words) for number, tool in enumerate(chosen)]
        case other:
            raise InvalidRequest(
                f"'{FIELD}' cannot insist on a call: this node has no grammar for this model's "
                f'calls ({other}); send "auto"',
                param=FIELD,
            )
    start, end = map(words, call_markers(tokenizer))
    rules = [
        f"start: {_calls(_LINE, parallel=parallel)}",
        f"call: {start} ({_any_of(chosen)}) {end}",
    ]
    return "\n".join([*rules, *calls])


def _calls(between: str, *, parallel: bool) -> str:
    """One `call`, or several."""
    return f"call ({between} call){{0,{_MOST_CALLS - 1}}}" if parallel else "call"


def _any_of(chosen: Sequence[Tool]) -> str:
    return " | ".join(f"call_{number}" for number in range(len(chosen)))


def _format(tokenizer: Any) -> str:
    if is_harmony(tokenizer):
        return "Harmony"
    if is_deepseek(tokenizer):
        return "DeepSeek"
    if not tokenizer.has_tool_calling:
        return "none that is known"
    return str(tokenizer.tool_parser.__module__).rpartition(".")[2]


class _Words:
    """Fixed text in Lark. What is a token of its own may come as that token, which text cannot
    always spell, or as text.
    """

    def __init__(self, tokenizer: Any) -> None:
        added = {token.content: number for number, token in tokenizer.added_tokens_decoder.items()}
        self._added: dict[str, int] = {text: int(number) for text, number in added.items()}
        longest_first = sorted(map(re.escape, self._added), key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(longest_first)})" if longest_first else "(?!)")

    def __call__(self, text: str) -> str:
        parts = [part for part in self._pattern.split(text) if part]
        return " ".join(self._part(part) for part in parts)

    def _part(self, part: str) -> str:
        number = self._added.get(part)
        return _text(part) if number is None else f"(<[{number}]> | {_text(part)})"

    def ends(self, text: str) -> bool:
        """Whether it is one token, behind which free text is over."""
        return text.strip() in self._added


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json_call(number: int, tool: Tool) -> str:
    """`{"name": …, "arguments": {…}}`, as Hermes and Qwen write it."""
    head = _text(f'{{"name": {json.dumps(tool["name"])}, "arguments": ')
    return f'call_{number}: "\\n"? {head} %json {_schema(tool)} "}}" "\\n"?'


def _tagged_call(number: int, tool: Tool, words: _Words) -> str:
    """`<function=…>` and a `<parameter=…>` for each argument, as Qwen's newer models write it."""
    rules: list[str] = []
    parts = [_text(f"\n<function={tool['name']}>\n")]
    for place, (name, schema, required) in enumerate(_arguments(tool)):
        rule = f"value_{number}_{place}"
        part = _text(f"<parameter={name}>\n") + f" {rule}"
        rules.append(_value(rule, schema, "\n</parameter>\n", words))
        parts.append(part if required else f"({part})?")
    parts.append(_text("</function>\n"))
    return "\n".join([f"call_{number}: {' '.join(parts)}", *rules])


def _keyed_call(number: int, tool: Tool, words: _Words) -> str:
    """The name, and `<arg_key>` and `<arg_value>` for each argument, as GLM writes it."""
    rules: list[str] = []
    parts = [_text(tool["name"]), '"\\n"?']
    for place, (name, schema, required) in enumerate(_arguments(tool)):
        rule = f"value_{number}_{place}"
        key, value = words(f"<arg_key>{name}</arg_key>"), words("<arg_value>")
        part = f'{key} "\\n"? {value} {rule} "\\n"?'
        rules.append(_value(rule, schema, "</arg_value>", words))
        parts.append(part if required else f"({part})?")
    return "\n".join([f"call_{number}: {' '.join(parts)}", *rules])


def _deepseek_calls(chosen: Sequence[Tool], words: _Words, *, parallel: bool, fenced: bool) -> str:
    """The name, a separator and JSON; `fenced`: as V3 and R1 write it."""
    (first, last), (start, separator, end) = map(words, DEEPSEEK), map(words, DEEPSEEK_CALL)
    rules = [
        f"start: {first} {_calls(f'{_LINE}?', parallel=parallel)} {last}",
        f"call: {start} ({_any_of(chosen)}) {end}",
    ]
    for number, tool in enumerate(chosen):
        name, tail = tool["name"], ""
        if fenced:
            name, tail = f"{name}\n```json\n", _text("\n```")
        head = f'"function" {separator} {_text(name)}' if fenced else f"{_text(name)} {separator}"
        rules.append(f"call_{number}: {head} %json {_schema(tool)} {tail}")
    return "\n".join(rules)


def _harmony_calls(chosen: Sequence[Tool], words: _Words) -> str:
    """One call, as gpt-oss writes it, from the answer's first header on: thoughts and what is told
    to the user may come before. The token behind the call ends the answer, so there is no second.
    """
    start, channel, message, end = map(words, HARMONY[:4])
    hint = f'" json" | " "? {words("<|constrain|>")} "json"'
    told = f'{channel} ("analysis" | "commentary") {message} /(?s:.*)/ {end}'
    rules = [f"start: before* ({_any_of(chosen)})", f'before: {told} {start} "assistant"']
    for number, tool in enumerate(chosen):
        addressed = f"to=functions.{tool['name']}"
        by_channel = f"{channel} {_text(f'commentary {addressed}')}"
        by_role = f'{_text(f" {addressed}")} {channel} "commentary"'
        head = f"({by_channel} | {by_role}) ({hint})? {message}"
        rules.append(f"call_{number}: {head} %json {_schema(tool)}")
    return "\n".join(rules)


def _schema(tool: Tool) -> str:
    return _json({"type": "object", **(tool.get("parameters") or {})})


def _json(schema: Mapping[str, Any]) -> str:
    """A document whose spaces have an end, as in `grammars.py`."""
    return json.dumps({**schema, "x-guidance": {"whitespace_pattern": SPACES}})


def _arguments(tool: Tool) -> list[tuple[str, dict[str, Any], bool]]:
    """By name: a schema that stands by itself, and whether it is required."""
    parameters: dict[str, Any] = tool.get("parameters") or {}
    shared = {name: parameters[name] for name in _DEFINITIONS if name in parameters}
    known: dict[str, Any] = parameters.get("properties") or {}
    required: list[str] = parameters.get("required") or []
    found = [(name, _object(known[name]) | shared, name in required) for name in known]
    return found + [(name, {"type": "string"}, True) for name in required if name not in known]


def _object(schema: object) -> dict[str, Any]:
    return dict(cast("dict[str, Any]", schema)) if isinstance(schema, dict) else {}


def _value(rule: str, schema: dict[str, Any], closing: str, words: _Words) -> str:
    """Strings stand as they are, up to what closes them; anything else is JSON."""
    end = words(closing)
    choices: object = schema.get("enum")
    if isinstance(choices, list) and all(isinstance(c, str) for c in cast("list[object]", choices)):
        either = " | ".join(_text(str(choice)) for choice in cast("list[object]", choices))
        return f"{rule}: ({either}) {end}"
    if schema.get("type") != "string":
        return f"{rule}: %json {_json(schema)} {end}"
    if words.ends(closing):
        return f"{rule}: /(?s:.*)/ {end}"
    return f"{rule}[suffix={_text(closing)}]: /(?s:.*)/"

"""The grammar of a call that a request insists on, in the format of a model's own calls."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from ...placement.errors import InvalidRequest
from .answer_format import DEEPSEEK, DEEPSEEK_CALL, HARMONY, call_format, call_markers
from .argument_grammar import ValueRules, argument_lists
from .lark import Words, json_document, quoted
from .schemas import SchemaDocument, SchemaFault

FIELD: Final = "tool_choice"
_MOST_CALLS: Final = 16
_OPEN: Final = {"$ref", "allOf", "anyOf", "oneOf", "patternProperties", "additionalProperties"}
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
    words, parallel = Words(tokenizer), bool(wanted["parallel"])
    start, end = call_markers(tokenizer)
    match call_format(tokenizer):
        case "Harmony":
            return _harmony_calls(chosen, words)
        case "DeepSeek":
            # What V3 and R1 write stands in their templates too; V3.1 writes less.
            fenced = "```json" in str(getattr(tokenizer, "chat_template", None))
            return _deepseek_calls(chosen, words, parallel=parallel, fenced=fenced)
        case "json_tools":
            calls = [_json_call(number, tool) for number, tool in enumerate(chosen)]
        case "qwen3_coder":
            values = ValueRules("\n</parameter>\n", words, end)
            calls = [_tagged_call(number, tool, values) for number, tool in enumerate(chosen)]
            calls += values.rules
        case "glm47":
            values = ValueRules("</arg_value>", words, end)
            calls = [_keyed_call(number, tool, words, values) for number, tool in enumerate(chosen)]
            calls += values.rules
        case _:
            # See `plain_calls.py`.
            calls = [_json_call(number, tool) for number, tool in enumerate(chosen)]
            return "\n".join([f"start: {_any_of(chosen)}", *calls])
    rules = [
        f"start: {_calls(_LINE, parallel=parallel)}",
        f"call: {words(start)} ({_any_of(chosen)}) {words(end)}",
    ]
    return "\n".join([*rules, *calls])


def _calls(between: str, *, parallel: bool) -> str:
    """One `call`, or several."""
    return f"call ({between} call){{0,{_MOST_CALLS - 1}}}" if parallel else "call"


def _any_of(chosen: Sequence[Tool]) -> str:
    return " | ".join(f"call_{number}" for number in range(len(chosen)))


def _json_call(number: int, tool: Tool) -> str:
    """`{"name": …, "arguments": {…}}`, as Hermes and Qwen write it."""
    head = quoted(f'{{"name": {json.dumps(tool["name"])}, "arguments": ')
    return f'call_{number}: "\\n"? {head} {_schema(tool)} "}}" "\\n"?'


def _tagged_call(number: int, tool: Tool, values: ValueRules) -> str:
    """`<function=…>` and a `<parameter=…>` for each argument, as Qwen's newer models write it."""
    head, tail = quoted(f"\n<function={tool['name']}>\n"), quoted("</function>\n")

    def part(name: str, value: str) -> str:
        return quoted(f"<parameter={name}>\n") + f" {value}"

    return f"call_{number}: {_ways(tool, (head, part, tail), values)}"


def _keyed_call(number: int, tool: Tool, words: Words, values: ValueRules) -> str:
    """The name, and `<arg_key>` and `<arg_value>` for each argument, as GLM writes it."""

    def part(name: str, value: str) -> str:
        key, begin = words(f"<arg_key>{name}</arg_key>"), words("<arg_value>")
        return f'{key} "\\n"? {begin} {value} "\\n"?'

    head = f'{quoted(tool["name"])} "\\n"?'
    return f"call_{number}: {_ways(tool, (head, part, ''), values)}"


def _ways(
    tool: Tool, spelling: tuple[str, Callable[[str, str], str], str], values: ValueRules
) -> str:
    """A call whose arguments stand apart. `spelling`: what comes before them, an argument by its
    name and its value's rule, and what comes behind them. Raises InvalidRequest naming it."""
    head, part, tail = spelling
    document = SchemaDocument(tool.get("parameters") or {})
    ways: list[str] = []
    place = ""
    try:
        for arguments in argument_lists(document):
            parts = [head]
            for name, schema, required in arguments:
                place = f" '{name}'"
                written = part(name, values.name(document, schema))
                parts.append(written if required else f"({written})?")
                values.count(parts[-1])
            ways.append(" ".join([*parts, tail]))
    except SchemaFault as fault:
        raise InvalidRequest(
            f"the tool '{tool['name']}' cannot be enforced: the schema of its arguments{place}: "
            f"{fault}",
            param="tools",
        ) from fault
    return " | ".join(ways)


def _deepseek_calls(chosen: Sequence[Tool], words: Words, *, parallel: bool, fenced: bool) -> str:
    """The name, a separator and JSON; `fenced`: as V3 and R1 write it."""
    (first, last), (start, separator, end) = map(words, DEEPSEEK), map(words, DEEPSEEK_CALL)
    rules = [
        f"start: {first} {_calls(f'{_LINE}?', parallel=parallel)} {last}",
        f"call: {start} ({_any_of(chosen)}) {end}",
    ]
    for number, tool in enumerate(chosen):
        name, tail = tool["name"], ""
        if fenced:
            name, tail = f"{name}\n```json\n", quoted("\n```")
        head = f'"function" {separator} {quoted(name)}' if fenced else f"{quoted(name)} {separator}"
        rules.append(f"call_{number}: {head} {_schema(tool)} {tail}")
    return "\n".join(rules)


def _harmony_calls(chosen: Sequence[Tool], words: Words) -> str:
    """One call, as gpt-oss writes it, from the answer's first header on: thoughts and what is told
    to the user may come before. The token behind the call ends the answer, so there is no second.
    """
    start, channel, message, end = map(words, HARMONY[:4])
    hint = f'" json" | " "? {words("<|constrain|>")} "json"'
    told = f'{channel} ("analysis" | "commentary") {message} /(?s:.*)/ {end}'
    rules = [f"start: before* ({_any_of(chosen)})", f'before: {told} {start} "assistant"']
    for number, tool in enumerate(chosen):
        addressed = f"to=functions.{tool['name']}"
        by_channel = f"{channel} {quoted(f'commentary {addressed}')}"
        by_role = f'{quoted(f" {addressed}")} {channel} "commentary"'
        head = f"({by_channel} | {by_role}) ({hint})? {message}"
        rules.append(f"call_{number}: {head} {_schema(tool)}")
    return "\n".join(rules)


def _schema(tool: Tool) -> str:
    """Undeclared arguments have no place in an enforced call, as in formats with tags: a model that
    knows no end would go on inventing them."""
    parameters: dict[str, Any] = {"type": "object", **(tool.get("parameters") or {})}
    if not _OPEN & parameters.keys():
        parameters["additionalProperties"] = False
    return json_document(parameters)

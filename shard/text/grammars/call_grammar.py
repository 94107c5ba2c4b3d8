"""The grammar of a required tool call.

Models whose calls are JSON write it in their own format. All others, whose own spelling has no
quotes or none of JSON's, write one call as plain JSON (`plain_calls.py` is about its prompt),
as they do in vLLM.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ....placement.errors import InvalidRequest
from ..tools.answer_format import HARMONY, call_format
from ..tools.object_formats import DEEPSEEK_CALL, DEEPSEEK_MARKS, HERMES
from ..tools.schemas import SchemaFault
from .enforceable import enforceable
from .grammars import COMMENT, SPACES

FIELD: Final = "tool_choice"
_MAX_CALLS: Final = 16
_OPEN: Final = {"$ref", "allOf", "anyOf", "oneOf", "patternProperties", "additionalProperties"}
_LINE: Final = '"\\n"'
Tool = Mapping[str, Any]


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def json_document(schema: Mapping[str, Any]) -> str:
    """A JSON document with finite white space (`grammars.SPACES`).

    Alternatives of `oneOf` that the library cannot distinguish are treated like `anyOf`. Raises
    SchemaFault.
    """
    options = {"whitespace_pattern": SPACES, "coerce_one_of": True}
    return f"%json {json.dumps({**enforceable(schema), 'x-guidance': options})}"


class Words:
    """Writes fixed text in Lark.

    Text that is a token of its own is allowed as that token, which text cannot always spell, and as
    text.
    """

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is mlx-lm's wrapper."""
        added = {token.content: number for number, token in tokenizer.added_tokens_decoder.items()}
        self._added: dict[str, int] = {text: int(number) for text, number in added.items()}
        longest_first = sorted(map(re.escape, self._added), key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(longest_first)})" if longest_first else "(?!)")

    def __call__(self, text: str) -> str:
        parts = [part for part in self._pattern.split(text) if part]
        return " ".join(self._part(part) for part in parts)

    def _part(self, part: str) -> str:
        number = self._added.get(part)
        return quoted(part) if number is None else f"(<[{number}]> | {quoted(part)})"


def call_grammar(tokenizer: Any, request: str, tools: Sequence[Tool]) -> str:
    """The grammar, in Lark, of an answer that must call a tool.

    `tokenizer` is mlx-lm's wrapper; `request` is JSON: the `names` that may be called (null: any),
    and whether calls may be `parallel`. Raises InvalidRequest.
    """
    fields: dict[str, Any] = json.loads(request)
    names: list[str] | None = fields["names"]
    declared = [tool["function"] for tool in tools]
    selected = [tool for tool in declared if names is None or tool["name"] in names]
    if not selected:
        raise InvalidRequest(f"'{FIELD}' insists on a tool that is not declared", param=FIELD)
    words, parallel = Words(tokenizer), bool(fields["parallel"])
    name = call_format(tokenizer)
    match name:
        case "Harmony":
            return _harmony_calls(selected, words)
        case "DeepSeek":
            # V3 and R1 write a fence, which their templates contain; V3.1 does not.
            fenced = "```json" in str(getattr(tokenizer, "chat_template", None))
            return _deepseek_calls(selected, words, parallel=parallel, fenced=fenced)
        case _:
            pass
    calls = [_json_call(number, tool) for number, tool in enumerate(selected)]
    if name != "json_tools":
        return "\n".join([f"start: {_any_of(selected)}", *calls])
    rules = [
        f"start: {_calls(_LINE, parallel=parallel)}",
        f"call: {words(HERMES.start)} ({_any_of(selected)}) {words(HERMES.end)}",
    ]
    return "\n".join([*rules, *calls])


def _calls(between: str, *, parallel: bool) -> str:
    """The rule of one `call`, or of several."""
    return f"call ({between} call){{0,{_MAX_CALLS - 1}}}" if parallel else "call"


def _any_of(tools: Sequence[Tool]) -> str:
    return " | ".join(f"call_{number}" for number in range(len(tools)))


def _json_call(number: int, tool: Tool) -> str:
    """The rule of `{"name": …, "arguments": {…}}`, the format of Hermes and Qwen."""
    head = quoted(f'{{"name": {json.dumps(tool["name"])}, "arguments": ')
    return f'{_named(tool)}call_{number}: "\\n"? {head} {_schema(tool)} "}}" "\\n"?'


def _named(tool: Tool) -> str:
    """A comment about the purpose of the rules below it, on a line of its own."""
    return f"{COMMENT}the tool '{json.dumps(tool['name'])[1:-1]}'\n"


def _deepseek_calls(tools: Sequence[Tool], words: Words, *, parallel: bool, fenced: bool) -> str:
    """Rules of a name, a separator and JSON; `fenced`: in the format of V3 and R1."""
    (first, last), (start, separator, end) = map(words, DEEPSEEK_MARKS), map(words, DEEPSEEK_CALL)
    rules = [
        f"start: {first} {_calls(f'{_LINE}?', parallel=parallel)} {last}",
        f"call: {start} ({_any_of(tools)}) {end}",
    ]
    for number, tool in enumerate(tools):
        name, tail = tool["name"], ""
        if fenced:
            name, tail = f"{name}\n```json\n", quoted("\n```")
        head = f'"function" {separator} {quoted(name)}' if fenced else f"{quoted(name)} {separator}"
        rules.append(f"{_named(tool)}call_{number}: {head} {_schema(tool)} {tail}")
    return "\n".join(rules)


def _harmony_calls(tools: Sequence[Tool], words: Words) -> str:
    """Rules of one call, as in gpt-oss, from the answer's first header on.

    Reasoning and text for the user may come before. The token after the call ends the answer, so
    there is only one.
    """
    start, channel, message, end = map(words, HARMONY[:4])
    hint = f'" json" | " "? {words("<|constrain|>")} "json"'
    text_message = f'{channel} ("analysis" | "commentary") {message} /(?s:.*)/ {end}'
    rules = [f"start: before* ({_any_of(tools)})", f'before: {text_message} {start} "assistant"']
    for number, tool in enumerate(tools):
        addressed = f"to=functions.{tool['name']}"
        by_channel = f"{channel} {quoted(f'commentary {addressed}')}"
        by_role = f'{quoted(f" {addressed}")} {channel} "commentary"'
        head = f"({by_channel} | {by_role}) ({hint})? {message}"
        rules.append(f"{_named(tool)}call_{number}: {head} {_schema(tool)}")
    return "\n".join(rules)


def _schema(tool: Tool) -> str:
    """The rule of a tool's arguments, without undeclared ones, which could have no end."""
    parameters: dict[str, Any] = {"type": "object", **(tool.get("parameters") or {})}
    if not _OPEN & parameters.keys():
        parameters["additionalProperties"] = False
    try:
        return json_document(parameters)
    except SchemaFault as fault:
        raise InvalidRequest(
            f"the tool '{tool['name']}' cannot be enforced: the schema of its arguments: {fault}",
            param="tools",
        ) from fault

"""Spellings of calls that models are known for, whole and in a stream."""

from typing import Any

import pytest
from call_spellings import SPELLINGS, deliver, tool

from exo_node.shard.text.tools.object_formats import DEEPSEEK_CALL, DEEPSEEK_MARKS

Calls = list[tuple[str, Any]]
STRING = {"type": "string"}
TOOLS = [
    tool("f", {"a": STRING, "b": {"type": "integer"}}, ["a"]),
    tool("now", {}),
    tool("pick", {"of": {"type": "array"}}),
    {"type": "function", "function": {"name": "wait", "parameters": None}},
]
AX: Calls = [("f", {"a": "x"})]
AXB: Calls = [("f", {"a": "x", "b": 2})]
NOW: Calls = [("now", {})]
OPEN, CLOSE = "<tool_call>\n", "\n</tool_call>"
A, B = "<parameter=a>\nx\n</parameter>\n", "<parameter=b>\n2\n</parameter>\n"
BAR = "｜DSML｜"  # noqa: RUF001

QWEN: dict[str, Calls] = {
    f"<function=f>\n{A}</function>{CLOSE}": AX,
    f"I look.\n\n<function=f>\n{A}</function>{CLOSE}": AX,
    f"<function=f>\n{A}</function>": AX,
    f"{OPEN}<function=f>\n{A}{CLOSE}": AX,
    f"{OPEN}<function=f>\n{A}</function>": AX,
    f"{OPEN}<function=f>\n<parameter=a>\nx\n</function>{CLOSE}": AX,
    f"{OPEN}<function=f>\n<parameter=a>\nx{CLOSE}": AX,
    f"{OPEN}<function=f>\n<parameter=a>\nx\n{B}</function>{CLOSE}": AXB,
    f'{OPEN}<function="f">\n{A}</function>{CLOSE}': AX,
    f"{OPEN}<function='f'>\n<parameter=\"a\">\nx\n</parameter>\n</function>{CLOSE}": AX,
    f"{OPEN}<function=f>\n{A}</function>\n<function=now>\n</function>{CLOSE}": AX + NOW,
    f"{OPEN}<function=now>\n</function>{CLOSE}": NOW,
    f"{OPEN}{OPEN}<function=f>\n{A}</function>{CLOSE}": AX,
    f'{OPEN}{{"name": "f", "arguments": {{"a": "x"}}}}{CLOSE}': AX,
}
HERMES: dict[str, Calls] = {
    f'{OPEN}{{"name": "now"}}{CLOSE}': NOW,
    f'{OPEN}{{"name": "now", "arguments": null}}{CLOSE}': NOW,
    f'{OPEN}{{"name": "wait", "arguments": {{}}}}{CLOSE}': [("wait", {})],
    f'{OPEN}{{"name": "pick", "arguments": {{"of": [1, {{"n": 2,}}, ]}}}}{CLOSE}': [
        ("pick", {"of": [1, {"n": 2}]})
    ],
    f'{OPEN}{{"name": "now", "arguments": ""}}{CLOSE}': NOW,
    f'{OPEN}{{"name": "now", "arguments": {{}}}}{CLOSE}': NOW,
    f'{OPEN}{{"name": "f", "arguments": {{"a": "x"}}}}}}{CLOSE}': AX,
    f'{OPEN}{{"name": "f", "arguments": {{"a": "x"}}}}}}}}\n{CLOSE}': AX,
    f'{OPEN}{{"name": "f", "arguments": {{"a": "x"}}{CLOSE}': AX,
    f'{OPEN}{{"name": "f", "arguments": {{"a": "x"{CLOSE}': AX,
    f'{OPEN}{{"name": "f", "arguments": {{"a": "x"}}}}\n{{"name": "now"}}{CLOSE}': AX + NOW,
    f'{OPEN}[{{"name": "f", "arguments": {{"a": "x"}}}}, {{"name": "now"}}]{CLOSE}': AX + NOW,
    f'{OPEN}{{"arguments": {{"a": "x"}}, "name": "f"}}{CLOSE}': AX,
    f'{OPEN}{{"name": "f", "arguments": "{{\\"a\\": \\"x\\"}}"}}{CLOSE}': AX,
    f'{OPEN}{{"name": "f", "parameters": {{"a": "x", }}, "id": "1"}}{CLOSE}': AX,
    f'{OPEN}{{"type": "function", "function": {{"name": "now", "arguments": "{{}}"}}}}{CLOSE}': NOW,
    f'{OPEN}{{"name": "f", "arguments": {{"a": "line\none\ttab"}}}}{CLOSE}': [
        ("f", {"a": "line\none\ttab"})
    ],
    f'{OPEN}{{"name": "f", "arguments": {{"a": "say "hi" now"}}}}{CLOSE}': [
        ("f", {"a": 'say "hi" now'})
    ],
    f'{OPEN}{{"name": "f", "arguments": {{"a": "\\d+\\\'"}}}}{CLOSE}': [("f", {"a": "\\d+'"})],
    f'{OPEN}{{"name": "f", "arguments": {{"a": "x", "b": 2}}}}': AXB,
}
PLAIN: dict[str, Calls] = {
    '{"name": "f", "arguments": {"a": "x"}}': AX,
    '{"name": "f", "parameters": {"a": "x"}}': AX,
    '\n{"name": "f", "parameters": {"a": "x", "b": "2"}}\n': AXB,
    '```json\n{"name": "f", "arguments": {"a": "x"}}\n```': AX,
    '```\n{"name": "f", "arguments": {"a": "x"}}\n```\n': AX,
    '{"name": "f", "parameters": {"a": "x"}}; {"name": "now", "parameters": {}}': AX + NOW,
    '{"type": "function", "name": "f", "parameters": {"a": "x"}}': AX,
    '```json\n{"name": "f", "arguments": {"a": "```\\n}\\n```"}}\n```': [
        ("f", {"a": "```\n}\n```"})
    ],
}
TEXT = (
    '{"name": "f"}',
    '{"name": "g", "arguments": {"a": "x"}}',
    '{"name": "f", "arguments": {"b": 2}}',
    '{"name": "f", "arguments": {"a": "x"}} is what I would call.',
    'Say {"name": "f", "arguments": {"a": "x"}}',
    '```json\n{"name": "f", "arguments": {"a": "x"}}\n```\nThis calls f.',
    '{"colour": "red"}',
    "{",
    "```python\nprint()\n```",
    "`f`",
)
DEEPSEEK: dict[str, Calls] = {
    f'<{BAR}{section}>\n<{BAR}invoke name="f">\n<{BAR}parameter name="a" string="true">x'
    f'</{BAR}parameter>\n<{BAR}parameter name="b" string="false">2</{BAR}parameter>\n'
    f"</{BAR}invoke>\n</{BAR}{section}>": AXB
    for section in ("function_calls", "tool_calls")
}
OTHERS: list[tuple[str, str, Calls]] = [
    ("DSML", text, calls) for text, calls in DEEPSEEK.items()
] + [
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": "x"}}, {"name": "now"}]', AX + NOW),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "x"}[TOOL_CALLS]now[ARGS]{}', AX + NOW),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"a": "x"}', AX),
    ("pythonic", "<|tool_call_start|>[f(a='x', b=2), now()]<|tool_call_end|>", AXB + NOW),
    ("Harmony", '<|start|>assistant to=f<|channel|>commentary<|message|>{"a": "x"}', AX),
    ("Harmony", '<|channel|>commentary to=f code<|message|>{"a": "x"}<|call|>', AX),
    ("Harmony", '<|channel|>analysis to=functions.f<|message|>{"a": "x"}<|call|>', AX),
    ("glm47", "<tool_call>now</tool_call>", NOW),
    ("glm47", "<tool_call>f<arg_key>a</arg_key><arg_value>x</tool_call>", AX),
    (
        "DeepSeek",
        f"{DEEPSEEK_MARKS[0]}{DEEPSEEK_CALL[0]}function{DEEPSEEK_CALL[1]}f\n```json\n"
        f'{{"a": "x"}}\n```{DEEPSEEK_CALL[2]}{DEEPSEEK_MARKS[1]}',
        AX,
    ),
    (
        "kimi_k3",
        '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
        '<|open|>json type="object"<|sep|>{"a": "x"}<|close|>json<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>",
        AX,
    ),
]
CASES: list[tuple[str, str, Calls]] = [
    *(("qwen3_coder", text, calls) for text, calls in QWEN.items()),
    *(("json_tools", text, calls) for text, calls in HERMES.items()),
    *(("", text, calls) for text, calls in PLAIN.items()),
    *(("qwen3_coder", text, calls) for text, calls in PLAIN.items()),
    *OTHERS,
]


@pytest.mark.parametrize(("call_format", "text", "calls"), CASES)
def test_a_spelling_that_a_model_is_known_for_is_a_call(
    call_format: str, text: str, calls: Calls
) -> None:
    for texts in ([text], list(text)):
        for in_parts in (False, True):
            answer = deliver(call_format, texts, TOOLS, in_parts=in_parts)
            assert (answer.values, answer.open) == (calls, [])
            assert answer.content in ("", "I look.")


@pytest.mark.parametrize("spaces", [4000, 4500, 5000])
def test_where_a_text_is_too_long_for_a_beginning_does_not_depend_on_its_division(
    spaces: int,
) -> None:
    text = f'{OPEN}{{"name": "f",{" " * spaces}"arguments": {{"a": "x"}}}}{CLOSE}'
    whole, *others = (
        deliver("json_tools", texts, TOOLS)
        for texts in ([text], list(text), [text[:99], text[99:]])
    )
    assert all((each.values, each.content) == (whole.values, whole.content) for each in others)
    assert (whole.values == AX) == (spaces < 4096)


@pytest.mark.parametrize("call_format", ["", "qwen3_coder", "json_tools"])
@pytest.mark.parametrize("text", TEXT)
def test_json_that_is_not_the_call_of_a_declared_tool_is_content(
    call_format: str, text: str
) -> None:
    for texts in ([text], list(text)):
        answer = deliver(call_format, texts, TOOLS)
        assert (answer.values, answer.open, answer.content) == ([], [], text)


def test_a_tag_in_a_text_about_tags_is_content() -> None:
    for text in ("Write <function=NAME> first.", "<function=g>\n</function>", "<function="):
        for texts in ([text], list(text)):
            answer = deliver("qwen3_coder", texts, TOOLS)
            assert (answer.values, answer.open, answer.content) == ([], [], text)


def test_a_plain_call_that_was_cut_is_content() -> None:
    text = SPELLINGS[""]("f", {"a": "x"})
    assert deliver("", [text[:-3]], TOOLS, stopped=False).content == text[:-3]

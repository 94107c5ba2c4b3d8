"""Calls as they are written: in every format the parts add up to the whole call's arguments."""

import asyncio
import json
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import pytest
from call_spellings import SPELLINGS as WRITTEN
from families_text import codec_of, divided
from hypothesis import given, settings
from hypothesis import strategies as st

from exo_node.proto import peer_pb2 as pb
from exo_node.shard.runner.answer_pieces import AnswerPieces
from exo_node.shard.text.tools.channels import AnswerFormat
from exo_node.shard.text.tools.object_formats import DEEPSEEK_CALL
from exo_node.shard.text.tools.object_formats import DEEPSEEK_MARKS as DEEPSEEK
from exo_node.shard.text.tools.tool_calls import Call, parse_calls

OPTIONAL: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "null"}]}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "write",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "content": {"$ref": "#/$defs/text"},
                "note": OPTIONAL,
                "mixed": {"type": ["string", "integer", "boolean"]},
                "port": {"type": ["string", "integer"], "minimum": 1024},
                "lines": {"type": "integer"},
                "ratio": {"type": "number"},
                "force": {"type": "boolean"},
                "edits": {"type": "array", "items": {"type": "object"}},
                "more": {"type": "object"},
            },
            "required": ["path"],
            "$defs": {"text": {"type": "string"}},
        },
    },
}
_BEGIN, _SEP, _END = DEEPSEEK_CALL
Spell = Callable[[dict[str, Any]], str]


def compact(arguments: dict[str, Any]) -> str:
    """JSON that is not canonical."""
    return json.dumps(arguments, separators=(" ,", ":"))


def deepseek(arguments: dict[str, Any]) -> str:
    return f"{DEEPSEEK[0]}{_BEGIN}write{_SEP}{compact(arguments)}{_END}{DEEPSEEK[1]}"


def deepseek_v3(arguments: dict[str, Any]) -> str:
    fenced = f"function{_SEP}write\n```json\n{json.dumps(arguments, indent=1)}\n```"
    return f"{DEEPSEEK[0]}{_BEGIN}{fenced}{_END}{DEEPSEEK[1]}"


def harmony(arguments: dict[str, Any]) -> str:
    header = "<|start|>assistant<|channel|>commentary to=functions.write <|constrain|>json"
    return f"{header}<|message|>{json.dumps(arguments, ensure_ascii=False)}"


def plain(arguments: dict[str, Any]) -> str:
    return f'{{"name": "write", "arguments": {compact(arguments)}}}'


def hermes(arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{plain(arguments)}\n</tool_call>"


SPELLINGS: dict[str, tuple[str, Spell]] = {
    "qwen3_coder": ("qwen", partial(WRITTEN["qwen3_coder"], "write")),
    "glm47": ("glm", partial(WRITTEN["glm47"], "write")),
    "DeepSeek": ("deepseek", deepseek),
    "DeepSeek V3": ("deepseek", deepseek_v3),
    "Harmony": ("gpt_oss", harmony),
    "json_tools": ("hermes", hermes),
    "plain": ("demo", plain),
}
"""The family whose tokenizer has each format."""
HERMES = AnswerFormat(
    {"content": [("<tool_call>", "call")], "call": [("</tool_call>", "content")]},
    call_format="json_tools",
)


class StreamedAnswer:
    """The parts of one answer that a client gets."""

    def __init__(self) -> None:
        self.content = ""
        self.calls: list[tuple[str, str]] = []
        self.cut: list[str] = []
        self.parts = 0
        self.later = ""  # arguments, however the call began
        self._open: list[str] = []

    def take(self, piece: pb.Piece) -> None:
        match piece.WhichOneof("piece"):
            case "text":
                self.content += piece.text
            case "call":
                self.calls.append((piece.call.name, piece.call.arguments))
            case "call_part":
                self._part(piece.call_part)
            case _:
                pass

    def _part(self, part: pb.CallPart) -> None:
        self.parts += 1
        self.later += part.arguments
        if not part.name and not self._open:
            return  # an earlier attempt handed out its beginning
        self._open = self._open or [part.name]
        self._open.append(part.arguments)
        if part.ends:
            name, *arguments = self._open
            self._open = []
            if part.is_cut:
                self.cut.append("".join(arguments))
            else:
                self.calls.append((name, "".join(arguments)))

    @property
    def unfinished(self) -> str:
        return "".join(self._open[1:])


@cache
def format_of(kind: str) -> tuple[AnswerFormat, tuple[int, ...], Callable[..., list[Call] | None]]:
    """A format, a prompt in it, and what reads its calls."""
    family, _ = SPELLINGS[kind]
    if kind == "plain":
        form = AnswerFormat().unmarked_call()
        return form, (1,), partial(parse_calls, "", tools=[TOOL])
    if family == "hermes":
        return HERMES, (1,), partial(parse_calls, "json_tools", tools=[TOOL])
    codec = codec_of(family)
    prompt = codec.encode_chat([{"role": "user", "content": "hi"}], tools=[TOOL])
    return codec.answer_format, tuple(prompt), partial(codec.calls, tools=[TOOL])


def pieces_of(kind: str, *, in_parts: bool) -> AnswerPieces:
    format, prompt, calls = format_of(kind)

    async def parse(text: str) -> list[Call] | None:
        return calls(text=text)

    return AnswerPieces(format, prompt, parse, tools=[TOOL], in_parts=in_parts)


def stream_answer(
    kind: str,
    texts: Sequence[str],
    *,
    in_parts: bool = True,
    replayed: int = 0,
    finish: bool = True,
    stopped: bool = True,
) -> StreamedAnswer:
    """`replayed`: the number of texts that an earlier attempt has delivered."""

    async def run() -> StreamedAnswer:
        pieces, answer = pieces_of(kind, in_parts=in_parts), StreamedAnswer()
        for number, text in enumerate(texts):
            for piece in await pieces.feed(text):
                if number >= replayed:
                    answer.take(piece)
        if finish:
            for piece in await pieces.finish("", stopped=stopped):
                answer.take(piece)
        return answer

    return asyncio.run(run())


def spoken(kind: str, *calls: dict[str, Any]) -> str:
    family, spell = SPELLINGS[kind]
    thought = "</think>" if family in ("qwen", "glm") else ""
    return thought + "\n".join(map(spell, calls))


TRICKY = (
    *("</parameter>", "\n</parameter>\n", "</function>", "<parameter=x>", "</arg_value>", "null"),
    *("<arg_key>", "{", '"', "\\", "\\u00e9", "\n", "\t", "é", "😀", "5", " ", "true", "[1", "}"),
)
TEXT = st.one_of(
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12),
    st.lists(st.sampled_from(TRICKY), max_size=6).map("".join),
)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "path": TEXT,
    "content": TEXT,
    "note": st.one_of(TEXT, st.none()),
    "mixed": st.one_of(TEXT, st.integers(), st.booleans()),
    "port": st.one_of(TEXT, st.integers(0, 9999)),
    "lines": st.integers(-9, 10**6),
    "ratio": st.floats(allow_nan=False, allow_infinity=False),
    "force": st.booleans(),
    "edits": st.lists(st.dictionaries(TEXT, st.one_of(TEXT, st.integers())), max_size=2),
    "more": st.dictionaries(TEXT, TEXT, max_size=2),
    "unknown": st.one_of(TEXT, st.integers()),
}
ARGUMENTS = st.fixed_dictionaries(
    {"path": TEXT}, optional={name: values for name, values in VALUES.items() if name != "path"}
).flatmap(lambda fields: st.permutations(list(fields.items())).map(dict))
SIZES = st.lists(st.integers(0, 12), max_size=80)


def has_name_twice(arguments: str) -> bool:
    names: list[int] = []

    def count(pairs: list[tuple[str, Any]]) -> None:
        names.append(len(pairs) - len(dict(pairs)))

    _ = json.loads(arguments, object_pairs_hook=count)
    return any(names)


@pytest.mark.parametrize("kind", SPELLINGS)
@settings(deadline=None, max_examples=80)
@given(calls=st.lists(ARGUMENTS, min_size=1, max_size=2), sizes=SIZES)
def test_the_parts_of_a_call_are_the_arguments_of_the_whole_answer_at_any_division(
    kind: str, calls: list[dict[str, Any]], sizes: list[int]
) -> None:
    text = spoken(kind, *(calls[:1] if kind in ("Harmony", "plain") else calls))
    whole = stream_answer(kind, [text], in_parts=False)
    assert not whole.parts
    in_parts = stream_answer(kind, divided(text, sizes))
    streamed_calls = [(name, json.loads(arguments)) for name, arguments in in_parts.calls]
    if "<tool_call>" in whole.content or DEEPSEEK[0] in whole.content:
        return  # a text that is ambiguous, and no call
    assert streamed_calls == [(name, json.loads(arguments)) for name, arguments in whole.calls]
    if not any(has_name_twice(arguments) for _, arguments in in_parts.calls):
        assert in_parts.calls == whole.calls
    assert (in_parts.content, in_parts.cut) == (whole.content, [])


LONG: dict[str, Any] = {"path": "a.py", "lines": 2, "content": "print('é')\n" * 100}


@pytest.mark.parametrize("kind", SPELLINGS)
def test_a_long_string_flows_while_it_is_written(kind: str) -> None:
    text = spoken(kind, LONG)
    arguments = stream_answer(kind, [text], in_parts=False).calls[0][1]
    for part in (0.3, 0.6, 0.9):
        streamed = stream_answer(kind, list(text[: int(part * len(text))]), finish=False).unfinished
        assert arguments.startswith(streamed)
        assert len(streamed) > (part - 0.25) * len(arguments)


def test_a_value_that_is_no_string_comes_when_it_is_complete() -> None:
    fields = {"path": "a.py", "ratio": 0.25, "note": None, "force": True, "lines": 5}
    for kind in SPELLINGS:
        text = spoken(kind, {**fields, "edits": [{"old": "a"}], "content": "x"})
        for until in (text.index("edits"), text.index("content"), len(text) - 30):
            streamed = stream_answer(kind, [text[:until]], finish=False).unfinished
            assert json.loads(streamed + "}") == fields, "lists wait for the whole call"


@pytest.mark.parametrize("kind", SPELLINGS)
def test_an_attempt_that_continues_hands_out_only_what_is_new(kind: str) -> None:
    """At every border: both attempts together are the call, with nothing twice or lost."""
    fields = {**LONG, "content": 'print("é")\n' * 3, "edits": [{"a": 1}], "note": "n"}
    text = spoken(kind, fields)
    [(_, whole)] = stream_answer(kind, list(text)).calls
    for border in range(len(text)):
        first = stream_answer(kind, [text[:border]], finish=False)
        pieces = stream_answer(kind, [text[:border], text[border:]], replayed=1)
        assert first.unfinished + pieces.later == whole or (
            [arguments for _, arguments in first.calls] == [whole] and not pieces.later
        )


@pytest.mark.parametrize("kind", SPELLINGS)
def test_a_call_that_was_cut_off_stays_open_and_what_was_not_sent_is_content(kind: str) -> None:
    """No client may take it for the whole call."""
    whole = spoken(kind, {"path": "a.py", "content": "rm -rf /tmp/x", "edits": [{"old": "x"}]})
    for at, streamed, rest in (("/tmp", "rm -rf", ""), ("old", '"path": "a.py"', "edits")):
        answer = stream_answer(kind, [whole[: whole.index(at)]], stopped=False)
        assert answer.calls == []
        [arguments] = answer.cut
        assert streamed in arguments and rest in answer.content
        with pytest.raises(json.JSONDecodeError):
            json.loads(arguments)


def test_a_call_that_the_model_ended_without_what_is_required_stays_open() -> None:
    for kind in SPELLINGS:
        text = spoken(kind, {"note": "n", "lines": 3})
        assert stream_answer(kind, [text], in_parts=False).calls == []
        answer = stream_answer(kind, [text])
        assert (answer.calls, answer.cut) == ([], ['{"note": "n", "lines": 3'])
        assert answer.content == ""


BROKEN = {
    '{"name": "write", "arguments": {"path": "a", lines: 3}}': ('{"path": "a"', "lines: 3}}"),
    '{"name": "write", "arguments": {"path": "a", "lines": x}}': ('{"path": "a"', "x}}"),
    "<function=write>\n<parameter=path>\na\n</parameter>\nwell\n<parameter=lines>\n": (
        '{"path": "a\\n</parameter>\\nwell',
        "<parameter=lines>\n",
    ),
    "<function=write>\n<parameter=path>\na\n</parameter>\n<parameter=lines>\n3 <tool_call>": (
        '{"path": "a"',
        "<parameter=lines>\n3 <tool_call>",
    ),
}


@pytest.mark.parametrize("inner", BROKEN)
def test_a_call_that_the_model_ended_broken_stays_open_and_the_rest_is_content(inner: str) -> None:
    kind = "qwen3_coder" if "<function" in inner else "json_tools"
    arguments, rest = BROKEN[inner]
    for texts in ([inner], list(inner)):
        answer = stream_answer(kind, ["</think>" * (kind != "json_tools"), "<tool_call>", *texts])
        assert (answer.calls, answer.cut) == ([], [arguments])
        assert rest in answer.content


@pytest.mark.parametrize(("port", "value"), [(80, "80"), (8080, 8080)])
@pytest.mark.parametrize("kind", ["qwen3_coder", "glm47"])
def test_a_number_that_the_schema_refuses_is_a_string_in_the_parts(
    kind: str, port: int, value: object
) -> None:
    answer = stream_answer(kind, list(spoken(kind, {"path": "a", "port": port})))
    [(_, arguments)] = answer.calls
    assert json.loads(arguments) == {"path": "a", "port": value} and not answer.cut


def test_a_tool_that_is_not_declared_is_never_begun() -> None:
    for kind in SPELLINGS:
        text = spoken(kind, LONG).replace("write", "erase")
        answer = stream_answer(kind, list(text))
        assert (answer.parts, answer.calls) == (0, [])
        assert "erase" in answer.content


def test_a_name_that_comes_twice_has_its_last_value() -> None:
    twice = '{"path": "a", "path": "b", "lines": 1}'
    text = f'<tool_call>{{"name": "write", "arguments": {twice}}}</tool_call>'
    [(_, arguments)] = stream_answer("json_tools", list(text)).calls
    assert json.loads(arguments) == {"path": "b", "lines": 1}


def test_half_a_character_in_an_argument_ends_no_answer() -> None:
    half = json.dumps({"path": "a\ud83d", "note": "é"})
    for kind in ("json_tools", "plain"):
        text = spoken(kind, {"path": "@"}).replace('{"path":"@"}', half)
        for in_parts in (True, False):
            [(_, arguments)] = stream_answer(kind, list(text), in_parts=in_parts).calls
            assert json.loads(arguments) == {"path": "a\ufffd", "note": "é"}

"""For any text and any division, the calls of a stream are those of the whole answer, or open."""

import json
import random
from collections.abc import Iterator

import pytest
from call_spellings import MARKS, SPELLINGS, Delivered, deliver, tool
from families_text import divided
from hypothesis import given, settings
from hypothesis import strategies as st

from exo_node.shard.text.tools.call_formats import scanner_for
from exo_node.shard.text.tools.call_scanners import declared_names

STRING = {"type": "string"}
EITHER = {"type": ["string", "integer", "null"]}
TOOLS = [
    tool("edit", {"path": STRING, "old": STRING, "n": EITHER, "list": {"type": "array"}}, ["path"]),
    tool("now", {}),
]
PIECES = (
    *("</parameter>", "\n</parameter>\n", "</function>", "<parameter=old>\n", "<function=edit>"),
    *("<tool_call>", "</tool_call>", "</arg_value>", "<arg_key>old</arg_key>", "<arg_value>"),
    *('{"name": "edit", "arguments": {"path": "', '"', '"}}', "}", "{", "[", "]", ",", ":", "\\"),
    *(
        "\n",
        " ",
        "\t",
        "é",
        "😀",
        "null",
        "007",
        "5",
        "true",
        "<",
        "</",
        "```json\n",
        "```",
        "edit",
    ),
    *('<invoke name="edit">', '<parameter name="path">', "</invoke>", "]]>", "<param", "</param>"),
    *(
        "<|call|>",
        "<|end|>",
        "<|close|>argument<|sep|>",
        "<escape>",
        '<|"|>',
        "call:edit{",
        "(",
        ")",
    ),
    *("'", "\\u00e9", "\\ud83d", "[TOOL_CALLS]", "[ARGS]{", "path", "old", "="),
)


def hostile_text(call_format: str, chance: random.Random) -> str:
    """A call with hostile values, of which a part may be missing, doubled or replaced."""
    parts: list[str] = []
    for _ in range(chance.randint(1, 2)):
        arguments = {
            name: "".join(chance.choices(PIECES, k=chance.randint(0, 4)))
            for name in chance.sample(["path", "old", "n", "other"], chance.randint(0, 3))
        }
        parts.append(SPELLINGS[call_format](chance.choice(["edit", "edit", "now"]), arguments))
    text = chance.choice(["", "\n", "See:\n"]) + chance.choice(["", "\n"]).join(parts)
    for _ in range(chance.randint(0, 2)):
        at, size = chance.randint(0, len(text)), chance.randint(0, 12)
        other = "".join(chance.choices(PIECES, k=chance.randint(0, 2)))
        text = text[:at] + other + text[at + size :]
    return text + chance.choice(["", "", "\n", " done"])


def assert_same(
    call_format: str, text: str, sizes: list[int], *, stopped: bool = True
) -> Delivered:
    """Returns what a stream delivers."""
    whole = deliver(call_format, [text], TOOLS, in_parts=False, stopped=stopped)
    parts = deliver(call_format, divided(text, sizes), TOOLS, stopped=stopped)
    again = deliver(call_format, divided(text, sizes), TOOLS, in_parts=False, stopped=stopped)
    assert (again.calls, again.content) == (whole.calls, whole.content), "no division changes it"
    assert not whole.open
    rest = iter(whole.values)
    assert all(any(call == each for each in rest) for call in parts.values), "in their order"
    assert len(parts.calls) + len(parts.open) >= len(whole.calls)
    if not parts.open:
        assert (parts.values, parts.content) == (whole.values, whole.content)
    for arguments in parts.open:
        assert is_open(arguments)
    return parts


def is_open(arguments: str) -> bool:
    try:
        json.loads(arguments)
    except ValueError:
        return True
    return False


TEXTS = st.one_of(st.lists(st.sampled_from(PIECES), max_size=12).map("".join), st.text(max_size=20))


@pytest.mark.smoke
@settings(deadline=None, max_examples=60)
@given(
    call_format=st.sampled_from(list(SPELLINGS)),
    text=TEXTS,
    sizes=st.lists(st.integers(0, 9), max_size=40),
    stopped=st.booleans(),
)
def test_any_text_after_a_mark_is_read_alike_at_any_division(
    call_format: str, text: str, sizes: list[int], stopped: bool
) -> None:
    assert_same(call_format, MARKS.get(call_format, "") + text, sizes, stopped=stopped)


def random_divisions(count: int, seed: int) -> Iterator[tuple[str, str, list[int], bool]]:
    chance = random.Random(seed)
    for _ in range(count):
        call_format = chance.choice(list(SPELLINGS))
        text = hostile_text(call_format, chance)
        largest = chance.choice([1, 3, 9, 60])
        sizes = [chance.randint(0, largest) for _ in range(chance.randint(0, 200))]
        yield call_format, text, sizes, chance.random() < 0.8


@pytest.mark.smoke
def test_300_random_divisions_of_hostile_calls() -> None:
    for case in random_divisions(300, seed=0):
        assert_same(*case[:3], stopped=case[3])


@pytest.mark.timeout(3600)
def test_20000_random_divisions_of_hostile_calls() -> None:
    finished = unfinished = 0
    for case in random_divisions(20_000, seed=1):
        streamed = assert_same(*case[:3], stopped=case[3])
        finished += len(streamed.calls)
        unfinished += len(streamed.open)
    assert finished > 5_000 and unfinished > 500, "both kinds come"


FLOODS = (
    "x",
    " ",
    "\n",
    "<",
    '"',
    "\\",
    "</",
    "</parameter> ",
    "[",
    "{",
    "<tool_call>\n<function=edit>\n",
)


@pytest.mark.parametrize("call_format", SPELLINGS)
def test_a_flood_of_one_text_is_read_in_time(call_format: str) -> None:
    """Twice as long a text as may be held back."""
    for flood in FLOODS:
        flood *= 8_000 // len(flood)
        for text in (
            SPELLINGS[call_format]("edit", {"path": flood}),
            MARKS.get(call_format, "") + flood,
        ):
            scanner = scanner_for(call_format, declared_names(TOOLS))
            for at in range(0, len(text), 4):
                for _ in scanner.feed(text[at : at + 4]):
                    pass

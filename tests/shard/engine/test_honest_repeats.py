"""What people and programs want repeated passes the loop guard, and what models fall into ends.

Texts are tokenised by the demo's small vocabulary, which needs more tokens than others do.
"""

import base64
import random
from pathlib import Path

import pytest
from models import DEMO

from exo_node.shard.engine.loop_guard import EARLY, LATE, LoopGuard, LoopLimits, longest_run
from exo_node.shard.text.codec import TextCodec

CODEC = TextCodec.load(Path(DEMO))
MOST = 8192
"""Tokens of an answer that nothing ends."""


def ids_of(text: str) -> list[int]:
    return CODEC.encode_text(text)


def end_of(
    ids: list[int],
    limits: LoopLimits = EARLY,
    prompt: list[int] | None = None,
    call: tuple[int, ...] = (),
) -> int | None:
    """The number of tokens after which the guard ends an answer."""
    guard = LoopGuard(limits, prompt or (), call)
    return next((count for count, token in enumerate(ids, 1) if guard.push(token)), None)


def rows(row: str, count: int) -> str:
    return "\n".join(row for _ in range(count))


def board(size: int, cell: str = "0") -> str:
    return f"grid = [\n{rows('    [' + ', '.join([cell] * size) + '],', size)}\n]\n"


def table(columns: int, count: int) -> str:
    head = " | ".join(f"c{i}" for i in range(columns))
    rule = "|".join(["---"] * columns)
    return f"| {head} |\n|{rule}|\n{rows('|' + ' |' * columns, count)}\n"


def hex_dump(count: int) -> str:
    zeros = " ".join(["00"] * 16)
    return "\n".join(f"{16 * i:08x}  {zeros}  |................|" for i in range(count))


HONEST: dict[str, str] = {
    "empty Sudoku": board(9),
    "tic-tac-toe": board(3, "' '"),
    "chess board": board(8, "'.'"),
    "Connect Four": rows("[0, 0, 0, 0, 0, 0, 0],", 6),
    "16 x 16 map": board(16),
    "dots of a 15 x 15 Go board": rows("." * 15, 15),
    "a hundred zeros": ", ".join(["0"] * 100),
    "a hundred floats": str([0.0] * 100),
    "64 bytes of C": "{" + ", ".join(["0x00"] * 64) + "}",
    "an identity": "\n".join(str([int(i == j) for j in range(12)]) for i in range(12)),
    "empty CSV rows": rows(",,,,,,,", 30),
    "table with empty cells": table(8, 20),
    "rule of a wide table": "|" + "---|" * 60,
    "equal test lines": rows("test_it ... ok", 40),
    "dots of pytest": "." * 700,
    "equal JSON records": rows('{"id": null, "name": "", "tags": []},', 20),
    "a thousand A": "A" * 1000,
    "hex dump of zeros": hex_dump(16),
    "hex of zeros": "00" * 256,
    "base64 of zeros": base64.b64encode(bytes(600)).decode(),
    "80 columns of equals, 6 times": rows("=" * 80, 6),
    "blank lines": "\n" * 100,
    "closing tags": rows("</div>", 40),
    "a hundred times the same line": rows("I will not run in the hall.", 60),
    "lorem": rows("<p>Lorem ipsum dolor sit amet, consectetur adipiscing elit.</p>", 20),
    "a chorus": rows("Na na na na, hey hey hey, goodbye", 16),
    "CSS of eight equal rules": rows(".row { margin: 0; padding: 0; }", 24),
    "SVG of equal parts": rows('<rect width="10" height="10" fill="none"/>', 20),
    "no operations": rows("        pass", 60),
}
LARGE: dict[str, str] = {
    "32 x 32 map": board(32),
    "300 CSV rows": rows("0,0,0,0", 300),
    "hex dump of a kilobyte": hex_dump(64),
    "a thousand zeros": str([0] * 1000),
    "200 empty JSON records": rows('{"id": null, "name": ""},', 60),
    "300 equal test lines": rows("test ... ok", 300),
    "a map of dots": rows("." * 64, 40),
}
"""Files that a call writes."""


def paragraph(words: int, seed: int) -> str:
    draw = random.Random(seed)
    few = ["the", "a", "model", "runs", "then", "reads", "file", "again"]
    return " ".join(draw.choice(few) for _ in range(words))


LOOPS: dict[str, str] = {
    "a word": "the ",
    "a line": "I will now read the file again.\n",
    "two lines": "Let me check.\nWait, let me check again.\n",
    "a thought": "Hmm, but the test fails. So I should fix the test. But the test is right. ",
    "an import": "import os\n",
    "a record": '{"name": "a", "value": 1},\n',
    "a heading": "## Summary\n\nThe work is done.\n\n",
    "a sentence": paragraph(20, 1) + ". ",
    "a paragraph": paragraph(100, 2) + ".\n\n",
    "a long paragraph": paragraph(180, 3) + ".\n\n",
    "one token": "!",
    "spaces": " \n",
}


@pytest.mark.parametrize("name", HONEST)
def test_what_is_wanted_passes(name: str) -> None:
    text = f"Here it is:\n```\n{HONEST[name]}\n```\nDone.\n"
    assert end_of(ids_of(text)) is None


@pytest.mark.parametrize("name", LARGE)
def test_a_file_of_equal_lines_passes_within_a_call(name: str) -> None:
    call = tuple(ids_of("<tool_call>"))
    ids = [*ids_of("I write it."), *call, *ids_of(LARGE[name]), *ids_of("\n</tool_call>")]
    assert end_of(ids, call=call) is None
    assert end_of(ids, LATE) is None


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_ends_long_before_the_answer_would(name: str) -> None:
    loop = ids_of(LOOPS[name])
    ids = [*ids_of("First, the plan.\n"), *loop * (MOST // len(loop))]
    end = end_of(ids)
    assert end is not None and end <= 0.75 * MOST
    assert end <= max(EARLY.tokens, EARLY.repeats * len(loop)) + 2 * len(loop) + 20


@pytest.mark.parametrize("name", ["a word", "a line", "an import", "a record", "one token"])
def test_a_loop_within_a_call_ends_later(name: str) -> None:
    call, loop = tuple(ids_of("<tool_call>")), ids_of(LOOPS[name])
    ids = [*call, *loop * (MOST // len(loop))]
    end = end_of(ids, call=call)
    assert end is not None and LATE.tokens <= end < MOST


@pytest.mark.parametrize("count", [60, 200, 1000])
def test_what_the_prompt_repeats_may_be_repeated_as_often(count: int) -> None:
    line = "2026-01-31,0,0,0,0,,\n"
    file = ids_of(line * count)
    prompt = [*ids_of("Copy this file:\n"), *file, *ids_of("\nThanks.")]
    assert end_of([*ids_of("Here:\n"), *file, *ids_of("done")], prompt=prompt) is None
    if count >= 200:
        assert end_of(file) is not None, "without the prompt it is a loop"
    assert end_of(file * (1 + 4000 // len(file) + 1), prompt=prompt) is not None, "and then ends"


def test_a_line_that_the_prompt_has_once_is_a_loop_all_the_same() -> None:
    loop = ids_of(LOOPS["a line"])
    assert end_of(loop * 400, prompt=loop) == end_of(loop * 400)


@pytest.mark.parametrize(
    ("prompt", "loop", "longest"),
    [
        ([], [1], 0),
        ([1], [1], 0),
        ([1, 1, 1], [1], 3),
        ([2, 1, 1, 3, 1, 1, 1, 1], [1], 4),
        ([1, 2, 1, 2, 1], [1, 2], 5),
        ([2, 1, 2, 1, 2], [1, 2], 5),
        ([1, 2, 1], [1, 2], 0),
        ([1, 3, 1, 3, 1, 3], [1, 2], 0),
        ([9, *[1, 2, 3] * 4, 1, 9, *[1, 2, 3] * 2], [3, 1, 2], 13),
    ],
)
def test_the_longest_run_of_a_loop_in_a_prompt(
    prompt: list[int], loop: list[int], longest: int
) -> None:
    assert longest_run(prompt, loop) == longest

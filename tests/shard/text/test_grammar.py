"""Grammars over a real tokenizer: where they begin, how far drafts go, and what is refused."""

import itertools
import json
import random
import re
import threading
import time
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from models import DEMO
from random_schemas import random_schema

from exo_node.mtp.finite import NO_TOKEN
from exo_node.placement.errors import InvalidRequest
from exo_node.shard.text.codec import TextCodec
from exo_node.shard.text.grammars.grammar import Gate, MemoryGrowth, TokenGrammar, gate_of
from exo_node.shard.text.grammars.grammars import MAX_CHARS, MAX_PATTERN, GrammarSpec, spec_of
from exo_node.shard.text.tools.channels import AnswerFormat

CODEC = TextCodec.load(DEMO)
ENDS = sorted(CODEC.end_tokens)
SPEC = GrammarSpec("regex", "(yes|no)", "regex")
THINK, SAID = 4000, 4001
"""Any two ids serve as the marks of a model that reasons."""


def compiled(spec: GrammarSpec = SPEC, gate: Gate = Gate()) -> TokenGrammar:  # noqa: B008
    return CODEC.grammars.compile(spec, gate)


def allowed(mask: bytes | None) -> set[int]:
    assert mask is not None
    return {i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1}


def ids(text: str) -> list[int]:
    return CODEC.encode_text(text)


def behind(grammar: TokenGrammar, tokens: list[int]) -> TokenGrammar:
    grammar.take(tokens)
    return grammar


def test_only_what_continues_with_the_text_may_follow() -> None:
    allowed_ids = allowed(compiled().masks([])[0])
    texts = {CODEC.decode([token]) for token in allowed_ids}
    assert texts == {t for t in ("y", "ye", "yes", "n", "no") if len(ids(t)) == 1}
    assert allowed(behind(compiled(), ids("yes")).masks([])[0]) == set(ENDS)
    assert behind(compiled(), [*ids("yes"), ENDS[0]]).masks([]) == [None]


@pytest.mark.parametrize("count", range(5))
def test_masks_of_drafts_are_those_of_the_same_committed_tokens(count: int) -> None:
    spec = GrammarSpec("regex", "[a-d]{3}-[0-9]+", "regex")
    drafts = [token for char in "abc-7" for token in ids(char)][:count]
    grammar = compiled(spec)
    rows = grammar.masks(drafts)
    assert rows == [behind(compiled(spec), drafts[:n]).masks([])[0] for n in range(count + 1)]
    assert grammar.masks([]) == rows[:1], "looking ahead leaves no trace"


def test_after_a_draft_that_falls_rows_are_free_and_the_grammar_continues() -> None:
    grammar = compiled()
    wrong = ids("maybe")
    first, *rest = grammar.masks([ENDS[0], *wrong])
    assert rest == [None] * (1 + len(wrong))
    assert grammar.masks([]) == [first] and not grammar.failed
    grammar.take(ids("no"))
    assert grammar.masks([ENDS[0], *wrong])[1:] == [None] * (1 + len(wrong))
    assert not grammar.failed


@pytest.mark.parametrize("right", [0, 1], ids=["at once", "behind a right one"])
@pytest.mark.parametrize("wrong", [ids("maybe"), [10**6]], ids=["forbidden", "no token"])
def test_a_draft_that_falls_leaves_the_grammar_where_it_was(right: int, wrong: list[int]) -> None:
    grammar, good = compiled(), ids("no")[:right]
    untouched = grammar.masks(good)
    for _ in range(2):
        rows = grammar.masks([*good, *wrong])
        assert rows == [*untouched, *[None] * len(wrong)]
        assert grammar.masks(good) == untouched and not grammar.failed


SPELT = ["<|im_end|>", "a<|im_start|>b", "<tool_call>", "<|endoftext|>", "</think>"]


@pytest.mark.parametrize("spelt", SPELT)
@pytest.mark.parametrize("kind", ["json_schema", "regex"])
def test_a_control_token_that_a_grammar_spells_is_text(kind: str, spelt: str) -> None:
    """The document has its characters; no control token may stand for them, nor end the answer."""
    if kind == "json_schema":
        spec = GrammarSpec("json_schema", json.dumps({"const": spelt}), "f")
    else:
        spec = GrammarSpec("regex", re.escape(spelt), "f")
    grammar, expected, answer = compiled(spec), json.dumps(spelt), list[int]()
    expected = expected if kind == "json_schema" else spelt
    control = {token for token in range(4096) if not CODEC.decode([token])} | set(ENDS)
    while not (may := allowed(grammar.masks([])[0])) & set(ENDS):
        assert not may & control, answer
        answer.append(min(may, key=lambda token: -len(CODEC.decode([token]))))
        grammar.take(answer[-1:])
    assert CODEC.decode(answer) == expected
    assert may == set(ENDS)


def test_reasoning_that_several_ids_end_ends_with_all_of_them_in_a_row() -> None:
    first_masks = compiled().masks([])
    for tokens, over in (([SAID], False), ([SAID, 5, 7], False), ([SAID, SAID, 7], True)):
        grammar = compiled(gate=Gate(opens=(SAID, 7)))
        free = grammar.masks([])
        assert grammar.masks(tokens)[-1:] == (first_masks if over else free)
        grammar.take(tokens)
        assert grammar.masks([]) == (first_masks if over else free)


def test_after_no_token_the_answer_is_over() -> None:
    grammar = compiled()
    grammar.take([NO_TOKEN])
    assert grammar.masks([5]) == [None, None] and not grammar.failed


def test_reasoning_is_free_and_cannot_end_the_answer() -> None:
    grammar = compiled(gate=Gate(opens=(SAID,)))
    free = allowed(grammar.masks([])[0])
    assert not free & set(ENDS) and {SAID, *ids("maybe")} <= free
    rows = grammar.masks([*ids("maybe"), SAID, *ids("no")])
    assert allowed(rows[-1]) == set(ENDS)
    grammar.take([5, 6, SAID])
    assert grammar.masks([]) == compiled().masks([])


def test_an_answer_may_open_its_reasoning_itself() -> None:
    grammar = compiled(gate=Gate(opens=(SAID,), entry=THINK))
    first = allowed(grammar.masks([])[0])
    assert first == allowed(compiled().masks([])[0]) | {THINK}
    assert grammar.masks([*ids("no")[:1]])[1] == behind(compiled(), ids("no")[:1]).masks([])[0]
    assert THINK not in allowed(behind(grammar, [THINK, 5, SAID]).masks([])[0])


def test_a_call_of_a_tool_may_take_the_texts_place() -> None:
    call = 4002
    grammar = compiled(gate=Gate(opens=(SAID,), call=call))
    grammar.take([5, SAID])
    assert allowed(grammar.masks([])[0]) == allowed(compiled().masks([])[0]) | {call}
    assert behind(grammar, [call]).masks([7, 8]) == [None] * 3
    after_text = behind(compiled(gate=Gate(call=call)), ids("no")[:1])
    assert call not in allowed(after_text.masks([])[0])


def test_an_answer_with_headers_may_end_before_its_content_only_if_it_may_call_a_tool() -> None:
    """In this format the token that ends a call ends the answer."""
    form = AnswerFormat(initial="header", opens=(SAID,), route=lambda _text, _declared: "content")
    for calls in (True, False):
        gate = gate_of(form, [1], calls=calls)
        assert gate is not None
        (mask,) = compiled(gate=gate).masks([])
        assert (mask is None or set(ENDS) <= allowed(mask)) == calls


def test_gates_follow_from_the_format_and_the_prompt() -> None:
    thinks = AnswerFormat(starts=(THINK,), ends=(SAID,), opens=(SAID,), calls=(4002,))
    closed, opened = [1, THINK, 2, SAID, 3], [1, THINK, 2]
    assert gate_of(AnswerFormat(), [1], calls=False) == Gate()
    assert gate_of(thinks, [1], calls=False) == Gate((SAID,), THINK)
    assert gate_of(thinks, closed, calls=False) == Gate()
    assert gate_of(thinks, opened, calls=False) == Gate((SAID,))
    assert gate_of(thinks, opened, calls=True) == Gate((SAID,), None, 4002)
    assert gate_of(AnswerFormat(), [1], calls=True) == Gate(), "it cannot call any"
    assert gate_of(AnswerFormat(calls=(1, 2)), [1], calls=True) is None
    assert gate_of(AnswerFormat(initial="header"), [1], calls=False) is None


DEEP = '{"items": ' * 200 + "true" + "}" * 200

HOSTILE: list[tuple[str, str]] = [
    ("regex", "(" * 4000 + "a" + ")" * 4000),
    ("regex", "(" * 3),
    ("regex", "(?=a)b"),
    ("regex", "((a{1,900}){1,900}){1,900}b"),
    ("regex", "(x+x+)+y" * 1000),
    ("regex", "a?" * 4096),
    ("regex", "((((.?){0,20}b?){0,20}c?){0,20}d?){0,20}"),
    ("regex", "[^x]{1,100000}y"),
    ("regex", "|".join(f"(.{{0,{n}}}{c}){{{n}}}" for n in range(10, 60) for c in "abcde")),
    ("lark", "start: start"),
    ("lark", 'start: s\ns: s s | s s s | "a" | "aa"'),
    ("lark", "start: nothing"),
    ("lark", 'start: "a" start "a" |'),
    ("lark", "no grammar at all"),
    ("json_schema", "{"),
    ("json_schema", "[]"),
    ("json_schema", '{"type": "wrong"}'),
    ("json_schema", '{"$ref": "#/nowhere"}'),
    ("json_schema", '{"$ref": "https://example.com/schema"}'),
    ("json_schema", '{"$ref": "#"}'),
    ("json_schema", '{"not": {}}'),
    ("json_schema", '{"type": "string", "pattern": "(?=a)b"}'),
    ("json_schema", '{"type": "array", "items": {"$ref": "#"}, "minItems": 1}'),
    ("json_schema", DEEP),
    ("json_schema", json.dumps({"enum": [f"{i:06}x" for i in range(20_000)]})),
    ("json_schema", json.dumps({"type": "string", "pattern": "(a{1,99}){1,999}"})),
    ("json_schema", json.dumps({"type": "string", "minLength": 10**9})),
    ("json_schema", json.dumps({"properties": {f"p{i}": {"$ref": "#"} for i in range(5000)}})),
]


@pytest.mark.parametrize(("kind", "text"), HOSTILE, ids=lambda value: str(value)[:40])
def test_hostile_grammars_are_refused_by_name_or_bounded(kind: str, text: str) -> None:
    """Each either is refused, or gives masks, of which none takes long."""
    spec = spec_of(kind, text, "response_format")
    began = time.process_time()
    try:
        CODEC.grammars.check(spec)
        if time.process_time() - began > 2.0:  # the helper's limit
            return
        grammar = compiled(spec)
    except InvalidRequest as fault:
        assert fault.param == "response_format" and len(fault.message) < 1000
        return
    for _ in range(20):
        began = time.process_time()
        (mask,) = grammar.masks([])
        assert time.process_time() - began < 2.0
        if grammar.failed or mask is None:
            return
        grammar.take([min(allowed(mask))])


SIZES: list[tuple[str, int]] = [
    ("json_schema", MAX_CHARS),
    ("regex", MAX_PATTERN),
    ("lark", MAX_PATTERN),
]


@pytest.mark.parametrize(("kind", "most"), SIZES)
def test_a_grammar_of_any_size_is_not_even_sent(kind: str, most: int) -> None:
    assert len(spec_of(kind, "a" * most, "field").text) == most
    with pytest.raises(InvalidRequest, match="characters") as caught:
        _ = spec_of(kind, "a" * (most + 1), "field")
    assert caught.value.param == "field"


def test_a_kind_of_grammar_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        _ = spec_of("gbnf", "a", "grammar")


@pytest.mark.parametrize("number", [5, 0.01, 60, 86400, 10**6, 9973])
def test_a_multiple_with_few_remainders_is_followed(number: float) -> None:
    kind = "integer" if isinstance(number, int) else "number"
    schema = {"type": kind, "multipleOf": number}
    CODEC.grammars.check(GrammarSpec("json_schema", json.dumps(schema), "f"))


@pytest.mark.parametrize("number", [999983, 10007, 0.999983, 9999830, 2**31 - 1])
def test_a_multiple_that_would_take_seconds_is_refused_by_its_number(number: float) -> None:
    schema = {"items": {"anyOf": [{"type": "number", "multipleOf": number}]}}
    began = time.process_time()
    with pytest.raises(InvalidRequest, match=f"multipleOf {number} ") as caught:
        CODEC.grammars.check(GrammarSpec("json_schema", json.dumps(schema), "f"))
    assert caught.value.param == "f"
    assert time.process_time() - began < 1.0


def test_a_grammar_whose_first_masks_fail_is_refused_before_there_is_an_answer() -> None:
    """Its first mask is there: only a walk along an answer meets the limit."""
    spec = GrammarSpec("regex", "a?" * 1500, "f")
    assert compiled(spec).masks([])
    with pytest.raises(InvalidRequest, match="too many"):
        CODEC.grammars.check(spec)


def test_a_grammar_whose_every_mask_takes_long_is_refused() -> None:
    """Each mask considers all text that is forced after it."""
    spec = GrammarSpec("json_schema", json.dumps({"const": "z" * 150_000}), "f")
    with pytest.raises(InvalidRequest) as caught:
        CODEC.grammars.check(spec)
    assert caught.value.param == "f"


def test_an_answer_ends_whose_masks_take_more_memory_than_it_may_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The system's figure is made up: what a process has freed it takes again without growing."""
    sizes = itertools.count(1 << 30, 1 << 20)
    monkeypatch.setattr("exo_node.shard.text.grammars.grammar._resident", lambda: next(sizes))
    monkeypatch.setattr("exo_node.shard.text.grammars.grammar.GRAMMAR_BYTES", 1 << 20)
    monkeypatch.setattr("exo_node.shard.text.grammars.grammar._BYTES_PER_S", 1 << 40)  # of any CPU
    grammar = compiled(GrammarSpec("regex", "(.*a.{40}){3}", "f"))
    (mask,) = grammar.masks([])
    for _ in range(500):
        grammar.take([min(allowed(mask) - set(ENDS))])
        (mask,) = grammar.masks([])
        if grammar.failed:
            break
    assert "'f'" in grammar.failed and "1 MB" in grammar.failed
    assert mask is not None and not any(mask)


def test_memory_that_others_take_meanwhile_counts_for_little() -> None:
    growth = MemoryGrowth()
    with growth:
        pass
    assert growth.bytes < 1 << 20
    others: list[bytes] = []
    thread = threading.Thread(target=lambda: others.append(b"x" * (200 << 20)))
    with growth:
        thread.start()
        thread.join()
    assert others and growth.bytes < 40 << 20


def test_a_token_that_may_not_stand_there_fails_the_grammar_for_good() -> None:
    grammar = behind(compiled(), ids("maybe"))
    assert "regex" in grammar.failed
    (mask,) = grammar.masks([])
    assert mask is not None and not any(mask)


@pytest.mark.parametrize(
    ("spaces", "may"), [(" " * 4, True), ("\n" + " " * 40, True), (" " * 5, False), ("\n\n", False)]
)
def test_the_spaces_within_a_document_have_an_end(spaces: str, may: bool) -> None:
    grammar = compiled(GrammarSpec("json_schema", '{"type": "object"}', "f"))
    assert (not behind(grammar, ids("{" + spaces)).failed) == may


def test_any_way_through_a_hundred_random_schemas_is_a_valid_document() -> None:
    """Whatever a model prefers: each token is drawn from all that may follow."""
    chance = random.Random(0)
    for seed in range(100):
        schema = random_schema(seed)
        grammar = compiled(GrammarSpec("json_schema", json.dumps(schema), "f"))
        answer: list[int] = []
        while not answer or answer[-1] not in ENDS:
            mask = grammar.masks([])[0]
            answer.append(chance.choice(sorted(allowed(mask))))
            grammar.take(answer[-1:])
            assert len(answer) < 2000, seed
        validator: Any = Draft202012Validator(schema)
        assert not list(validator.iter_errors(json.loads(CODEC.decode(answer[:-1])))), seed

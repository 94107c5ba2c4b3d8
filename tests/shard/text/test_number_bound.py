"""Documents end under a model that never ends anything by itself: numbers, white space, formats."""

import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
from models import DEMO

from exo_node.shard.text.codec import TextCodec
from exo_node.shard.text.grammars.grammar import (
    DECIMALS,
    EXPONENT_DIGITS,
    WHOLE_DIGITS,
    Gate,
    TokenGrammar,
)
from exo_node.shard.text.grammars.grammars import GrammarSpec

CODEC = TextCodec.load(DEMO)
ENDS = frozenset(CODEC.end_tokens)
TEXTS = {token: CODEC.decode([token]) for token in range(4096)}
MOST = 400
Taste = Callable[[str, str], float]
"""How much a model wants a token's text after the text so far."""


def digits(_: str, text: str) -> float:
    return len(text) if text.isdigit() else -1


def decimals(before: str, text: str) -> float:
    return 9 if text == "." else digits(before, text)


def exponents(before: str, text: str) -> float:
    return 9 if text in "eE" else digits(before, text)


def signs(before: str, text: str) -> float:
    return 9 if text in ("-", "e", "+", ".") else digits(before, text)


def spaces(_: str, text: str) -> float:
    return len(text) if text and text.isspace() else -1


TASTES = (digits, decimals, exponents, signs, spaces)


def compiled(schema: Any) -> TokenGrammar:
    return CODEC.grammars.compile(GrammarSpec("json_schema", json.dumps(schema), "f"), Gate())


def allowed(grammar: TokenGrammar) -> set[int]:
    (mask,) = grammar.masks([])
    assert mask is not None
    bits = f"{int.from_bytes(mask, 'little'):b}"[::-1]
    return {token for token in TEXTS if bits[token : token + 1] == "1"}


def generate(grammar: TokenGrammar, taste: Taste, seed: int = 0) -> str | None:
    """The document of a model that ends only where it must; None: it does not end."""
    draw, text = random.Random(seed), ""
    for _ in range(MOST):
        options = sorted(allowed(grammar))
        others = [token for token in options if token not in ENDS]
        if not others:
            return text
        best = max(taste(text, TEXTS[token]) for token in others)
        liked = [token for token in others if taste(text, TEXTS[token]) == best]
        token = draw.choice(liked)
        grammar.take([token])
        text += TEXTS[token]
    return None


OPEN: list[Any] = [
    {"type": "integer"},
    {"type": "number"},
    {"type": "integer", "minimum": 3},
    {"type": "integer", "maximum": 3},
    {"type": "integer", "multipleOf": 7},
    {"type": "number", "minimum": 0},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "number", "multipleOf": 0.01},
    {"type": ["integer", "null"]},
    {"anyOf": [{"type": "integer"}, {"type": "number"}, {"type": "boolean"}]},
    {"const": 1234567890123456789012345678901234567890},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "time"},
    {"type": "string", "format": "duration"},
    {"type": "string", "pattern": "^[0-9]{40}$"},
]


@pytest.mark.parametrize("taste", TASTES, ids=lambda taste: taste.__name__)
@pytest.mark.parametrize("schema", OPEN, ids=json.dumps)
def test_a_document_of_numbers_ends(schema: Any, taste: Taste) -> None:
    within = (
        {"type": "object", "properties": {"a": schema}, "required": ["a"]}
        | {"additionalProperties": False},
        {"type": "array", "items": schema, "maxItems": 2},
    )
    for whole in (schema, *within) if taste is digits else (schema,):
        text = generate(compiled(whole), taste)
        assert text is not None, f"{whole} has no end"
        _ = json.loads(text)


@pytest.mark.parametrize("taste", [digits, decimals, exponents, signs])
def test_numbers_have_at_most_the_digits_that_are_documented(taste: Taste) -> None:
    for schema in ({"type": "number"}, {}):
        text = generate(compiled(schema), taste)
        assert text is not None
        number = re.fullmatch(r"-?([0-9]+)(?:\.([0-9]+))?(?:[eE][+-]?([0-9]+))?", text)
        assert number is not None, text
        most = (WHOLE_DIGITS, DECIMALS, EXPONENT_DIGITS)
        assert all(len(part or "") <= m for part, m in zip(number.groups(), most, strict=True))
        if taste is digits:
            assert len(number[1]) == WHOLE_DIGITS


def takes(schema: Any, text: str) -> bool:
    grammar = compiled(schema)
    for char in text:
        (token,) = CODEC.encode_text(char)
        if token not in allowed(grammar):
            return False
        grammar.take([token])
    return bool(allowed(grammar) & ENDS)


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("9223372036854775807", True),
        ("-9223372036854775808", True),
        ("92233720368547758070", False),
        ("0.1234567890123456", True),
        ("0.12345678901234567", False),
        ("3.141592653589793", True),
        ("1e308", True),
        ("2.5E-300", True),
        ("1e1000", False),
        ("6.02214076e23", True),
    ],
)
def test_the_numbers_of_64_bits_fit(text: str, *, fits: bool) -> None:
    assert takes({"type": "number"}, text) is fits


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string"}, json.dumps("1" * 60)),
        ({"type": "string", "pattern": "^[0-9]+$"}, json.dumps("1" * 60)),
        ({"type": "string", "pattern": "^[0-9]{44}$"}, json.dumps("1" * 44)),
        ({"type": "string", "pattern": "^[0-9]+-[0-9]+$"}, json.dumps("1" * 30 + "-" + "2" * 30)),
        ({"type": "string", "minLength": 50}, json.dumps("1" * 60)),
        ({"enum": [1, 10**30]}, "1" + "0" * 30),
        ({"type": "object"}, json.dumps({"1" * 30: "1.5" + "2" * 40})),
    ],
)
def test_digits_of_strings_and_of_given_numbers_are_free(schema: Any, text: str) -> None:
    assert takes(schema, text)


def test_drafts_see_the_bound_as_single_tokens_do() -> None:
    (one,) = CODEC.encode_text("1")
    grammar = compiled({"type": "integer"})
    rows = grammar.masks([one] * (WHOLE_DIGITS + 2))
    for count in range(WHOLE_DIGITS + 1):
        single = compiled({"type": "integer"})
        single.take([one] * count)
        assert single.masks([]) == [rows[count]], count
    assert rows[WHOLE_DIGITS + 1] is None, "behind a draft that falls"


def test_a_clients_own_grammar_is_not_bounded() -> None:
    grammar = CODEC.grammars.compile(GrammarSpec("regex", "[0-9]+(,[0-9]+)*", "regex"), Gate())
    assert generate(grammar, digits) is None

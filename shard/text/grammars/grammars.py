"""Grammars of requests, compiled within limits: JSON schemas, regular expressions, Lark.

llguidance is imported on use: most runners never need it.
"""

import json
import logging
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, Literal, cast, get_args

from ....placement.errors import InvalidRequest
from .enforceable import UNIQUE, enforceable, unenforced
from .grammar import Gate, NumberBound, TokenGrammar

if TYPE_CHECKING:
    from llguidance import LLParserLimits, LLTokenizer

_LOG: Final = logging.getLogger(__name__)
Kind = Literal["json_schema", "regex", "lark"]
"""Kinds of grammars that clients send."""
MAX_CHARS: Final = 256 << 10
"""The most characters of a JSON schema."""
MAX_PATTERN: Final = 8 << 10
"""Characters of a regular expression or a Lark grammar; memory grows with their square."""
_MAX_MULTIPLE: Final = 10_000
"""The most states for `multipleOf`: its digits without factors 2 and 5, one for each remainder."""
_WALK: Final = 8
"""Tokens of an answer for which `check` computes masks."""
_TOKEN_CPU_S: Final = 0.02
"""Seconds of CPU time for each of these masks, on average."""
SPACES: Final = r"(\r?\n[ \t]{0,40}|[ \t]{1,4})"
"""White space between a document's tokens: enough to indent it, but finite."""
_MAX_REASON: Final = 500
COMMENT: Final = "// "
"""Begins a line that names what the rules below it are for."""
_PLACE: Final = re.compile(r"at (\d+)\(\d+\): (?:failed to compile JSON schema: )?")
_QUOTED: Final = re.compile(r"\n +\d+ \| .*", re.DOTALL)
"""The lines of a grammar that the library quotes."""


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A requested grammar; `field` is its field in the request, for errors."""

    kind: Kind | Literal["calls"]
    """`calls`: Lark that the node itself wrote for calls of tools."""
    text: str
    field: str


def spec_of(kind: str, text: str, field: str) -> GrammarSpec:
    """A client's grammar. Raises InvalidRequest."""
    if kind not in get_args(Kind):
        raise InvalidRequest("a grammar of an unknown kind", param=field)
    most = MAX_CHARS if kind == "json_schema" else MAX_PATTERN
    if len(text) > most:
        raise InvalidRequest(
            f"'{field}' has {len(text)} characters; at most {most} are compiled", param=field
        )
    return GrammarSpec(cast("Kind", kind), text, field)


def refusal(spec: GrammarSpec, why: str) -> InvalidRequest:
    """The library's reason without the grammar; for a call, with its tool and argument."""
    place = _PLACE.match(why)
    if place and spec.kind == "calls":
        above = spec.text.split("\n")[: int(place[1])]
        tool = next((line for line in reversed(above) if line.startswith(COMMENT)), None)
        if tool is not None:
            argument, why = _argument_at_fault(above[-1]) or ("", why)
            what = tool.removeprefix(COMMENT) + argument
            return InvalidRequest(f"{what} cannot be enforced: {_one_line(why)}", param="tools")
    return InvalidRequest(f"'{spec.field}' cannot be enforced: {_one_line(why)}", param=spec.field)


def _one_line(why: str) -> str:
    reason = _QUOTED.sub("", _PLACE.sub("", why)).replace("<non-verbose/>", "")
    return " ".join(reason.split())[:_MAX_REASON]


def _argument_at_fault(rule: str) -> tuple[str, str] | None:
    """The first argument whose schema in a rule does not compile alone, and why."""
    from llguidance import LLMatcher

    _, is_json, text = rule.partition("%json ")
    if not is_json:
        return None
    schema, _ = json.JSONDecoder().raw_decode(text)
    for name, each in schema.get("properties", {}).items():
        alone = {**schema, "properties": {name: each}, "required": [name]}
        if why := LLMatcher.validate_grammar(f"start: %json {json.dumps(alone)}"):
            own = each if isinstance(each, dict) else {}
            inner = LLMatcher.validate_grammar(f"start: %json {json.dumps(own)}")
            return f", argument '{name}',", inner or why
    return None


def left_out(spec: GrammarSpec, tools: Sequence[Mapping[str, Any]], *, strict: bool) -> list[str]:
    """The keywords that the grammar leaves out of its schemas, as notes for a person.

    `tools`: those of the request. Raises InvalidRequest if it is `strict`.
    """
    match spec.kind:
        case "json_schema":
            schemas: list[Any] = [json.loads(spec.text)]
        case "calls":
            schemas = [tool["function"].get("parameters") for tool in tools]
        case "regex" | "lark":
            return []
    names = sorted({name for schema in schemas for name in unenforced(schema)})
    if UNIQUE in names and strict:
        raise refusal(spec, f'its schema has {UNIQUE}; leave that out, or "strict": true')
    return [f"{name} ({spec.field})" for name in names]


def _source(spec: GrammarSpec) -> str:
    from llguidance import LLMatcher

    match spec.kind:
        case "json_schema":
            try:
                schema = json.loads(spec.text)
                _check_multiples(spec, schema)
                return LLMatcher.grammar_from_json_schema(
                    json.dumps(enforceable(schema)), defaults={"whitespace_pattern": SPACES}
                )
            except (ValueError, RecursionError) as fault:
                raise refusal(spec, str(fault)) from fault
        case "regex":
            return LLMatcher.grammar_from_regex(spec.text)
        case "lark" | "calls":
            return LLMatcher.grammar_from_lark(spec.text)


def _check_multiples(spec: GrammarSpec, schema: Any) -> None:
    """Refuses a `multipleOf` that would take seconds to compile. Raises InvalidRequest."""
    values: list[Any] = [schema]
    while values:
        match values.pop():
            case {"multipleOf": int() | float() as number, **rest}:
                if _remainders(number) > _MAX_MULTIPLE:
                    why = f"multipleOf {number} has more than {_MAX_MULTIPLE} remainders to follow"
                    raise refusal(spec, f"{why}; choose a smaller one")
                values.extend(rest.values())
            case dict() as fields:
                values.extend(cast("dict[str, Any]", fields).values())
            case list() as items:
                values.extend(cast("list[Any]", items))
            case _:
                pass


def _remainders(number: float) -> int:
    """The states for `multipleOf number`: its digits without factors 2 and 5, which only depend on
    the last digits."""
    exponent = Decimal(str(number)).as_tuple().exponent
    if not isinstance(exponent, int) or abs(exponent) > 400 or number == 0:
        return 0  # llguidance refuses it
    rest = abs(int(Decimal(str(number)).scaleb(-min(exponent, 0))))
    for factor in (2, 5):
        while rest and rest % factor == 0:
            rest //= factor
    return rest


def _limits() -> "LLParserLimits":
    """Limits of one grammar, under which a mask takes about 1 to 10 ms."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        max_lexer_states=50_000,
        max_grammar_size=50_000,
        verbose_errors=False,
    )


class Grammars:
    """Compiles grammars for one tokenizer. For any thread."""

    def __init__(self, tokenizer: Any, ends: frozenset[int]) -> None:
        """`tokenizer` is one of transformers; `ends` are the tokens that end an answer."""
        self._tokenizer = tokenizer
        self._ends = ends
        self._table: LLTokenizer | None = None
        self._numbers: NumberBound | None = None

    def build_table(self) -> None:
        """Reads the vocabulary, which takes a second for a large one."""
        _ = self._vocabulary()

    def check(self, spec: GrammarSpec) -> None:
        """Compiles a grammar, computes a few masks, and drops it. Raises InvalidRequest.

        Runs in the helper process with limits on time and memory, so that the same work in the
        runner stays within them.
        """
        grammar = self.compile(spec, Gate())
        start = time.thread_time()
        for _ in range(_WALK):
            (mask,) = grammar.masks([])
            token = _highest(mask, self._ends)
            if token is None:
                break
            grammar.take([token])
        if grammar.failed:
            raise refusal(spec, grammar.failed)
        if time.thread_time() - start > _WALK * _TOKEN_CPU_S:
            raise refusal(spec, "each token of an answer would take too long; make it smaller")

    def compile(self, spec: GrammarSpec, gate: Gate) -> TokenGrammar:
        """Compiles a grammar for one answer, with its first mask. Raises InvalidRequest."""
        from llguidance import LLMatcher

        tokenizer = self._vocabulary()
        if tokenizer is None:
            raise refusal(spec, "this model's tokenizer has no table that grammars can read")
        matcher = LLMatcher(tokenizer, _source(spec), log_level=0, limits=_limits())
        if matcher.is_error():
            raise refusal(spec, matcher.get_error())
        self._numbers = self._numbers or NumberBound(tokenizer)
        numbers = self._numbers if spec.kind in ("json_schema", "calls") else None
        size = tokenizer.vocab_size
        grammar = TokenGrammar(matcher, self._ends, size, gate, spec.field, numbers)
        _ = grammar.masks([])
        if grammar.failed:
            raise refusal(spec, "no answer can satisfy it")
        return grammar

    def _vocabulary(self) -> "LLTokenizer | None":
        """The table of the vocabulary, built on first use.

        None if the tokenizer has no file to build it from.
        """
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if self._table is None and backend is not None:
            tokenizer_file: dict[str, Any] = json.loads(backend.to_str())
            tokenizer_file |= {"padding": None, "truncation": None}
            self._table = self._without_control_text(tokenizer_file) or self._new_table(
                tokenizer_file
            )
        return self._table

    def _new_table(self, tokenizer_file: Mapping[str, Any]) -> "LLTokenizer":
        from llguidance import LLTokenizer

        text = json.dumps(tokenizer_file, ensure_ascii=False)
        return LLTokenizer(text, eos_token=sorted(self._ends))

    def _without_control_text(self, tokenizer_file: Mapping[str, Any]) -> "LLTokenizer | None":
        """A table in which no text is a control token.

        A grammar with the text `<|im_end|>` means its characters; the token would end the turn.
        None if there is no such table.
        """
        template = json.dumps(getattr(self._tokenizer, "chat_template", None), ensure_ascii=False)
        hidden = {
            str(token["content"]): int(token["id"])
            for token in tokenizer_file.get("added_tokens", ())
            if token["special"] or (token["content"] in template and token["content"].strip())
        }
        try:
            table = self._new_table(_hide_tokens(tokenizer_file, hidden))
        except ValueError as fault:
            _LOG.warning("control tokens are text to grammars of this model: %s", fault)
            return None
        if all(table.is_special_token(number) for number in hidden.values()):
            return table
        _LOG.warning("control tokens are text to grammars of this model: their ids are not kept")
        return None


def _highest(mask: bytes | None, ends: frozenset[int]) -> int | None:
    """The highest id that the mask allows and that does not end the answer."""
    allowed = int.from_bytes(mask or b"", "little")
    for token in ends:
        allowed &= ~(1 << token)
    return allowed.bit_length() - 1 if allowed else None


def _hide_tokens(tokenizer_file: Mapping[str, Any], hidden: Mapping[str, int]) -> dict[str, Any]:
    """The tokenizer's file with the tokens `hidden` renamed so that no text contains them."""

    def name(content: str) -> str:
        return f"\ufdd0{hidden[content]}\ufdd0" if content in hidden else content

    added = [
        token
        if token["content"] not in hidden
        else {**token, "content": name(token["content"]), "special": True}
        for token in tokenizer_file.get("added_tokens", ())
    ]
    model: dict[str, Any] = dict(tokenizer_file["model"])
    match model.get("vocab"):
        case dict() as vocab:
            ids = cast("dict[str, int]", vocab)
            model["vocab"] = {name(text): number for text, number in ids.items()}
        case list() as vocab:
            rows = cast("list[list[Any]]", vocab)
            model["vocab"] = [[name(str(text)), *rest] for text, *rest in rows]
        case _:
            pass
    return {**tokenizer_file, "added_tokens": added, "model": model}

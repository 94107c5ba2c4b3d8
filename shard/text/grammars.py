"""Grammars of requests, compiled within limits: JSON schemas, regular expressions, Lark.

The library is imported where it is used: most runners never need it.
"""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, cast, get_args

from ...placement.errors import InvalidRequest
from .grammar import Gate, TokenGrammar

if TYPE_CHECKING:
    from llguidance import LLParserLimits, LLTokenizer

Kind = Literal["json_schema", "regex", "lark"]
MAX_CHARS: Final = 256 << 10
_SPACES: Final = r"(\r?\n[ \t]{0,40}|[ \t]{1,4})"
"""Between a document's tokens: enough to indent it, not enough to go on for ever."""
_TOLD: Final = 500


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What a request asks for; `field` is where, for its errors."""

    kind: Kind
    text: str
    field: str


def spec_of(kind: str, text: str, field: str) -> GrammarSpec:
    """Raises InvalidRequest."""
    if kind not in get_args(Kind):
        raise InvalidRequest("a grammar of an unknown kind", param=field)
    if len(text) > MAX_CHARS:
        raise InvalidRequest(
            f"'{field}' has {len(text)} characters; at most {MAX_CHARS} are compiled", param=field
        )
    return GrammarSpec(cast("Kind", kind), text, field)


def check(spec: GrammarSpec) -> None:
    """Compiles it without a tokenizer, and drops it again. Raises InvalidRequest.

    Runs in the helper process: what passes its limits here passes them in the runner.
    """
    from llguidance import LLMatcher

    why = LLMatcher.validate_grammar(_source(spec), None, limits=_limits())
    if why and not why.startswith("WARNING"):
        raise refused(spec, why)


def refused(spec: GrammarSpec, why: str) -> InvalidRequest:
    told = " ".join(why.split())[:_TOLD]
    return InvalidRequest(f"'{spec.field}' cannot be enforced: {told}", param=spec.field)


def _source(spec: GrammarSpec) -> str:
    from llguidance import LLMatcher

    match spec.kind:
        case "json_schema":
            try:
                return LLMatcher.grammar_from_json_schema(
                    spec.text, defaults={"whitespace_pattern": _SPACES}
                )
            except ValueError as fault:
                raise refused(spec, str(fault)) from fault
        case "regex":
            return LLMatcher.grammar_from_regex(spec.text)
        case "lark":
            return LLMatcher.grammar_from_lark(spec.text)


def _limits() -> "LLParserLimits":
    """Of one grammar: about 100 MiB at most, and 20 ms for a mask."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=50_000, max_grammar_size=50_000, verbose_errors=False)


class Grammars:
    """One tokenizer's. Any thread."""

    def __init__(self, tokenizer: Any, ends: frozenset[int]) -> None:
        """`tokenizer` is transformers' own; `ends` end an answer."""
        self._tokenizer = tokenizer
        self._ends = ends
        self._built: LLTokenizer | None = None

    def compile(self, spec: GrammarSpec, gate: Gate) -> TokenGrammar:
        """For one answer; its first mask is ready. Raises InvalidRequest."""
        from llguidance import LLMatcher

        tokenizer = self._vocabulary(spec)
        matcher = LLMatcher(tokenizer, _source(spec), log_level=0, limits=_limits())
        if matcher.is_error():
            raise refused(spec, matcher.get_error())
        size = tokenizer.vocab_size
        grammar = TokenGrammar(matcher, self._ends, size, gate, spec.field)
        _ = grammar.masks([])
        if grammar.failed:
            raise refused(spec, "no answer can satisfy it")
        return grammar

    def _vocabulary(self, spec: GrammarSpec) -> "LLTokenizer":
        """Built when it is first wanted: it takes a second for a large vocabulary."""
        from llguidance import LLTokenizer

        if self._built is None:
            backend = getattr(self._tokenizer, "backend_tokenizer", None)
            if backend is None:
                raise refused(spec, "this model's tokenizer has no table that grammars can read")
            written: dict[str, Any] = json.loads(backend.to_str())
            written |= {"padding": None, "truncation": None}
            text = json.dumps(written, ensure_ascii=False)
            self._built = LLTokenizer(text, eos_token=sorted(self._ends))
        return self._built

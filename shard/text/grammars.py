"""Grammars of requests, compiled within limits: JSON schemas, regular expressions, Lark.

The library is imported where it is used: most runners never need it.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, cast, get_args

from ...placement.errors import InvalidRequest
from .grammar import Gate, TokenGrammar

if TYPE_CHECKING:
    from llguidance import LLParserLimits, LLTokenizer

_LOG: Final = logging.getLogger(__name__)
Kind = Literal["json_schema", "regex", "lark"]
MAX_CHARS: Final = 256 << 10
SPACES: Final = r"(\r?\n[ \t]{0,40}|[ \t]{1,4})"
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
                    spec.text, defaults={"whitespace_pattern": SPACES}
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
        if self._built is None:
            backend = getattr(self._tokenizer, "backend_tokenizer", None)
            if backend is None:
                raise refused(spec, "this model's tokenizer has no table that grammars can read")
            written: dict[str, Any] = json.loads(backend.to_str())
            written |= {"padding": None, "truncation": None}
            self._built = self._without_control_text(written) or self._table(written)
        return self._built

    def _table(self, written: Mapping[str, Any]) -> "LLTokenizer":
        from llguidance import LLTokenizer

        text = json.dumps(written, ensure_ascii=False)
        return LLTokenizer(text, eos_token=sorted(self._ends))

    def _without_control_text(self, written: Mapping[str, Any]) -> "LLTokenizer | None":
        """A table in which no text is a control token: a grammar that spells `<|im_end|>` means
        its characters, and the token would end the turn in their place.

        None where the table cannot be written so.
        """
        template = json.dumps(getattr(self._tokenizer, "chat_template", None), ensure_ascii=False)
        hidden = {
            str(token["content"]): int(token["id"])
            for token in written.get("added_tokens", ())
            if token["special"] or (token["content"] in template and token["content"].strip())
        }
        try:
            table = self._table(_renamed(written, hidden))
        except ValueError as fault:
            _LOG.warning("control tokens are text to grammars of this model: %s", fault)
            return None
        if all(table.is_special_token(number) for number in hidden.values()):
            return table
        _LOG.warning("control tokens are text to grammars of this model: their ids are not kept")
        return None


def _renamed(written: Mapping[str, Any], hidden: Mapping[str, int]) -> dict[str, Any]:
    """The tokenizer's file with names for these tokens that no text has."""

    def name(content: str) -> str:
        return f"\ufdd0{hidden[content]}\ufdd0" if content in hidden else content

    added = [
        token
        if token["content"] not in hidden
        else {**token, "content": name(token["content"]), "special": True}
        for token in written.get("added_tokens", ())
    ]
    model: dict[str, Any] = dict(written["model"])
    match model.get("vocab"):
        case dict() as vocab:
            known = cast("dict[str, int]", vocab)
            model["vocab"] = {name(text): number for text, number in known.items()}
        case list() as vocab:
            rows = cast("list[list[Any]]", vocab)
            model["vocab"] = [[name(str(text)), *rest] for text, *rest in rows]
        case _:
            pass
    return {**written, "added_tokens": added, "model": model}

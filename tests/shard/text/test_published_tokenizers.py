"""Publishers' tokenizers: ids, streamed texts, grammars over the whole vocabulary, control tokens.

`TOKENIZERS` names a folder that has folders with `tokenizer.json` and `tokenizer_config.json` in
it, at any depth. None is copied into this repository; CONTRIBUTING.md names packages.
"""

import json
import os
from functools import cache
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from exo_node.placement.errors import InvalidRequest
from exo_node.shard.text.codec import TextCodec
from exo_node.shard.text.grammars.grammar import Gate, TokenGrammar
from exo_node.shard.text.grammars.grammars import GrammarSpec
from exo_node.shard.text.stop_strings import StopStrings

FOLDER = os.environ.get("TOKENIZERS", "")
PUBLISHED = {
    str(file.parent.relative_to(FOLDER)): file.parent
    for file in sorted(Path(FOLDER).rglob("tokenizer.json") if FOLDER else ())
    if (file.parent / "tokenizer_config.json").exists()
}
pytestmark = pytest.mark.skipif(
    not PUBLISHED, reason="TOKENIZERS names no folder with tokenizers: see CONTRIBUTING.md"
)
TEXTS = (
    "Hello, world!",
    " a space before, one after ",
    "12345 67,890.12 and 2.5e-3",
    "don't you're we'll I'M",
    "日本語のテキストと漢字 한국어 텍스트 مرحبا بالعالم",
    "👩‍👩‍👧‍👦 🏳️‍🌈 é vs é",
    "tabs\tand\n\n\nnew lines\r\n    ",
    "<|im_start|>user <bos> <|eot_id|>",
    "a" * 300,
)
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "people": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city", "people", "tags"],
    "additionalProperties": False,
}
DOCUMENT = '{"city": "São Paulo \\"日本\\" 👍", "people": 12345678, "tags": ["a b", ""]}'
WRONG = ('{"city": 3', '{"people"', '{"city": "a", "people": 1.')


@cache
def codec_of(name: str) -> TextCodec:
    return TextCodec.load(PUBLISHED[name])


@cache
def library(name: str) -> Tokenizer:
    return Tokenizer.from_file(str(PUBLISHED[name] / "tokenizer.json"))


def ids_of(name: str, text: str) -> list[int]:
    """The library's ids of a text behind a line break: at the very beginning some add a space."""
    before, whole = (
        library(name).encode(each, add_special_tokens=False).ids for each in ("\n", f"\n{text}")
    )
    assert whole[: len(before)] == before
    return whole[len(before) :]


def follows(grammar: TokenGrammar, ids: list[int]) -> bool:
    """Whether the grammar allows these ids, one after the other."""
    for token in ids:
        [mask] = grammar.masks([])
        assert mask is not None
        if not mask[token // 8] >> token % 8 & 1:
            return False
        grammar.take([token])
    return True


@pytest.mark.parametrize("name", PUBLISHED)
def test_ids_are_the_librarys_and_their_text_is_the_same_one_by_one(name: str) -> None:
    codec = codec_of(name)
    for text in TEXTS:
        ids = ids_of(name, text)
        prompt = codec.encode_text(f"\n{text}")
        assert prompt[len(prompt) - len(ids) :] == ids, text
        stream = codec.stream(StopStrings(()), ignore_end=True, continues=True)
        pieces: list[str] = []
        for token in ids:
            _ = stream.push(token)
            pieces.append(stream.take())
        assert "".join([*pieces, stream.finish()]) == text


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_document_of_a_schema_may_be_written_and_another_may_not(name: str) -> None:
    codec = codec_of(name)
    spec = GrammarSpec("json_schema", json.dumps(SCHEMA), "f")
    grammar = codec.grammars.compile(spec, Gate())
    assert follows(grammar, ids_of(name, DOCUMENT))
    assert any(follows(grammar, [end]) for end in codec.end_tokens)
    for wrong in WRONG:
        grammar = codec.grammars.compile(spec, Gate())
        assert not follows(grammar, ids_of(name, wrong))


@pytest.mark.parametrize("name", PUBLISHED)
def test_control_tokens_that_a_user_spells_are_text(name: str) -> None:
    codec = codec_of(name)
    config = json.loads((PUBLISHED[name] / "tokenizer.json").read_text())
    special = {each["content"]: each["id"] for each in config["added_tokens"] if each["special"]}
    spelt = " ".join([*special][:8])
    try:
        plain, evil = (
            codec.encode_chat([{"role": "user", "content": f"Hi {text}"}]) for text in ("", spelt)
        )
    except InvalidRequest as refused:
        assert "no chat template" in refused.message
        pytest.skip("it has no chat template")
    controls = set(special.values())
    assert sum(each in controls for each in evil) == sum(each in controls for each in plain)
    assert spelt in codec.decode(evil)

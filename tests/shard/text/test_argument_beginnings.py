"""The beginnings of raw arguments that are strings whatever follows."""

from hypothesis import given, settings
from hypothesis import strategies as st

from exo_node.shard.text.tools.argument_values import is_string_so_far, read_text
from exo_node.shard.text.tools.schemas import SchemaDocument

TEXT = st.one_of(
    st.text(st.sampled_from('nulNoetrufaTF0123456789-+.eE[]{}" \nabc'), max_size=12),
    st.sampled_from(["null", "None", "nullable", "-1e5", "1.0 ", "[1]", "True", "NaN", '"a"']),
)
KINDS = ["string", "integer", "number", "boolean", "null", "array", "object"]


@settings(max_examples=400)
@given(kinds=st.sets(st.sampled_from(KINDS), min_size=1), text=TEXT, at=st.integers(0, 12))
def test_a_text_that_is_certain_to_be_a_string_is_read_as_it_stands(
    kinds: set[str], text: str, at: int
) -> None:
    schema = {"type": sorted(kinds)}
    document = SchemaDocument(schema)
    if is_string_so_far(document.kinds(schema), text[:at]):
        assert read_text(document, text, schema) == text


@given(
    kinds=st.sets(st.sampled_from(KINDS), min_size=1),
    text=TEXT,
    more=st.sampled_from(["", "5" * 70, " " * 70, "abc" * 30]),
)
def test_what_a_beginning_decides_a_longer_one_does_not_change(
    kinds: set[str], text: str, more: str
) -> None:
    document, schema = SchemaDocument({}), {"type": sorted(kinds)}
    text += more
    verdicts = [is_string_so_far(document.kinds(schema), text[:at]) for at in range(len(text) + 1)]
    decided = [verdict for verdict in verdicts if verdict is not None]
    assert verdicts == [None] * (len(verdicts) - len(decided)) + decided
    assert len(set(decided)) <= 1


def test_a_few_characters_tell_a_string_from_other_kinds() -> None:
    kinds = frozenset(("string", "null", "integer"))
    assert [
        is_string_so_far(kinds, text) for text in ("", "hello", "nul", "nulls", "5", "5 a")
    ] == [*(None, True, None, True, None, True)]
    assert is_string_so_far(kinds, "1" * 65) is False
    assert is_string_so_far(frozenset(("integer",)), "a") is False

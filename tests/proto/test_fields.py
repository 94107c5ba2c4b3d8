"""Fields of messages are copied by their names."""

from types import SimpleNamespace

import pytest

from exo_node.proto import peer_pb2 as pb
from exo_node.proto.fields import changed, completed, named_fields, set_fields


def test_an_object_gives_the_fields_of_its_names_and_no_others() -> None:
    body = SimpleNamespace(max_tokens=5, stop=["a"], loop_guard=None, model="m")
    assert named_fields(pb.Limits, body) == {"max_tokens": 5, "stop": ["a"]}


@pytest.mark.parametrize("value", [False, True])
def test_a_field_that_is_set_to_its_default_is_set(value: bool) -> None:
    limits = pb.Limits(**named_fields(pb.Limits, SimpleNamespace(loop_guard=value)))
    assert set_fields(limits) == {"loop_guard": value}
    assert set_fields(pb.Limits()) == {}


def test_a_change_leaves_the_message_and_its_parts_as_they_were() -> None:
    grammar = pb.Grammar(kind="regex", text="a+")
    output = pb.Output(top_logprobs=0, grammar=grammar)
    assert changed(output, grammar=None) == pb.Output(top_logprobs=0)
    assert changed(output, top_logprobs=None) == pb.Output(grammar=grammar)
    copy = changed(output)
    copy.grammar.text = "b"
    assert output == pb.Output(top_logprobs=0, grammar=grammar)


def test_defaults_complete_what_is_not_set_and_join_no_lists() -> None:
    own = pb.Limits(max_tokens=3, stop=["X"])
    defaults = pb.Limits(max_tokens=77, stop=["END", "FIN"], loop_guard=False)
    assert completed(own, defaults) == pb.Limits(max_tokens=3, stop=["X"], loop_guard=False)
    bias = completed(pb.Sampling(logit_bias={1: 2.0}), pb.Sampling(logit_bias={5: 1.0}))
    assert dict(bias.logit_bias) == {1: 2.0}


def test_a_name_that_no_field_has_is_refused() -> None:
    with pytest.raises(ValueError, match="max_token"):
        _ = changed(pb.Limits(), max_token=5)

"""Models without a known call format: their description of tools, and their calls."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from families_text import codec_of
from models import DEMO

from exo_node.proto import peer_pb2 as pb
from exo_node.shard.runner.answer_pieces import AnswerPieces
from exo_node.shard.text.codec import TextCodec
from exo_node.shard.text.stop_strings import StopStrings
from exo_node.shard.text.template import TemplateOptions
from exo_node.shard.text.tools.channels import AnswerFormat
from exo_node.shard.text.tools.tool_calls import Call

CODEC = TextCodec.load(DEMO)
USER = {"role": "user", "content": "How is the weather?"}
SYSTEM = {"role": "system", "content": "Be brief."}


def tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("weather"), tool("now")]
CALL = '{"name": "weather", "arguments": {"city": "Ulm"}}'


def prompt(
    messages: Sequence[dict[str, Any]], names: Sequence[str] | None, codec: TextCodec = CODEC
) -> str:
    options = TemplateOptions(insists=names)
    return codec.decode(codec.encode_chat(messages, tools=TOOLS, options=options))


def test_a_model_whose_template_has_no_tools_reads_about_them_where_it_must_call_one() -> None:
    for messages in ([USER], [SYSTEM, USER]):
        text = prompt(messages, [])
        assert all(json.dumps(each["function"]) in text for each in TOOLS)
        assert text.count("<|im_start|>") == len(messages) + 1
        assert text.count("How is the weather?") == 1
    named = prompt([USER], ["now"])
    assert '"now"' in named and '"weather"' not in named
    assert '"now"' in prompt([{"role": "assistant", "content": "Hello"}], ["now"])


def test_a_model_that_need_not_call_or_whose_template_has_tools_reads_what_it_always_read() -> None:
    assert prompt([USER], None) == CODEC.decode(CODEC.encode_chat([USER]))
    assert prompt([USER], [], codec_of("qwen")) == prompt([USER], None, codec_of("qwen"))


def test_deferred_tools_are_in_no_templates_list_and_described_where_one_must_be_called() -> None:
    late = {**tool("late"), "defer_loading": True}
    qwen = codec_of("qwen")
    plain = qwen.encode_chat([USER], tools=TOOLS)
    assert qwen.encode_chat([USER], tools=[TOOLS[0], late, TOOLS[1]]) == plain
    assert qwen.encode_chat([USER], tools=[late]) == qwen.encode_chat([USER])
    options = TemplateOptions(insists=["late"])
    text = CODEC.decode(CODEC.encode_chat([USER], tools=[*TOOLS, late], options=options))
    assert '"late"' in text and '"weather"' not in text


def test_a_tools_description_cannot_spell_a_control_token() -> None:
    hostile = tool("f<|im_end|>")
    options = TemplateOptions(insists=[])
    ends = CODEC.encode_chat([USER]).count(4095)
    assert CODEC.encode_chat([USER], tools=[hostile], options=options).count(4095) == ends


def test_earlier_calls_and_their_results_are_text_in_turns_that_alternate() -> None:
    function = {"name": "weather", "arguments": '{"city": "Ulm"}'}
    calls = [{"id": n, "type": "function", "function": function} for n in ("c1", "c2")]
    chat = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
        {"role": "tool", "content": "rain", "tool_call_id": "c2"},
        {"role": "user", "content": "Which?"},
    ]
    text = CODEC.decode(CODEC.encode_chat(chat))
    assert text == (
        "<|im_start|>user\nHow is the weather?<|im_end|>\n"
        f"<|im_start|>assistant\n{CALL}\n{CALL}<|im_end|>\n"
        "<|im_start|>user\nResult:\nsunny\nResult:\nrain\nWhich?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert CODEC.decode(CODEC.encode_chat(chat[:2])).endswith(
        f"{CALL}<|im_end|>\n<|im_start|>assistant\n"
    )


THINKS = AnswerFormat(
    {"content": [("<think>", "reasoning")], "reasoning": [("</think>", "content")]}
)


def pieces(form: AnswerFormat, texts: Sequence[str], *, stopped: bool) -> list[Any]:
    """The pieces of an answer: (reasoning, text, call's arguments)."""

    async def parse(text: str) -> Sequence[Call] | None:
        return CODEC.calls(text, TOOLS)

    async def all_pieces() -> list[pb.Piece]:
        answer = AnswerPieces(form.unmarked_call(), [], parse, tools=TOOLS)
        delivered = [piece for text in texts for piece in await answer.feed(text)]
        return delivered + await answer.finish("", stopped=stopped)

    return [
        (p.reasoning, p.text, json.loads(p.call.arguments) if p.HasField("call") else None)
        for p in asyncio.run(all_pieces())
    ]


@pytest.mark.parametrize("size", [1, 5, 999])
def test_an_answer_that_is_a_call_in_json_is_a_call_however_it_is_divided(size: int) -> None:
    texts = [CALL[at : at + size] for at in range(0, len(CALL), size)]
    assert pieces(AnswerFormat(), texts, stopped=True) == [("", "", {"city": "Ulm"})]


def test_reasoning_may_come_before_such_a_call() -> None:
    form = AnswerFormat(THINKS.edges, within="reasoning", initial="reasoning")
    thought, *rest = pieces(form, [f"hm</think>\n{CALL}"], stopped=True)
    assert thought[0] == "hm" and rest == [("", "", {"city": "Ulm"})]


def test_a_stop_string_within_such_a_call_does_not_end_it() -> None:
    stops = StopStrings(["Ulm"], AnswerFormat().unmarked_call().with_tools(TOOLS))
    assert stops.feed(CALL) + stops.finish() == CALL and not stops.match


def test_such_a_call_that_is_cut_off_is_text_and_nothing_is_lost() -> None:
    form = AnswerFormat(THINKS.edges, within="reasoning", initial="reasoning")
    for whole in (AnswerFormat(), form):
        text = CALL[:20] if whole is not form else f"hm</think>{CALL[:20]}"
        *_, last = pieces(whole, [text], stopped=False)
        assert last == ("", CALL[:20], None)

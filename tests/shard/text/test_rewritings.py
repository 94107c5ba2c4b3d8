"""A chat that a template refuses, or would lose a part of, is rendered in another way."""

import copy
import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from chat_histories import CONVERSATIONS, ODD_TOOLS, TOOLS, missing, result, says, system, user
from engines import DEMO
from mlx_lm.tokenizer_utils import load as load_tokenizer  # pyright: ignore[reportUnknownVariableType]
from stubborn_templates import STUBBORN

from exo_node.placement.errors import InvalidRequest
from exo_node.shard.text.plain_calls import plainer_tool
from exo_node.shard.text.rewritings import (
    BY_PREFERENCE,
    MarkedChat,
    fold_texts_into_results,
    join_neighbours,
    needed_rewritings,
    shorten_ids,
    split_calls,
)
from exo_node.shard.text.template import ChatTemplate, TemplateOptions

Message = Mapping[str, Any]
IMAGE = [{"type": "image"}, {"type": "text", "text": "seen"}]


TOKENIZER: Any = load_tokenizer(DEMO)


@cache
def template(name: str) -> ChatTemplate:
    return template_of(STUBBORN[name])


def template_of(text: str) -> ChatTemplate:
    tokenizer = copy.copy(TOKENIZER)
    tokenizer._tokenizer = copy.copy(TOKENIZER._tokenizer)
    tokenizer._tokenizer.chat_template = text
    return ChatTemplate(tokenizer)


def rendered(
    one: ChatTemplate, chat: Sequence[Message], tools: Sequence[Message] = TOOLS
) -> tuple[str, list[str]]:
    """The prompt, and the notes about messages."""
    notes: list[str] = []
    text = "".join(one.render(chat, tools, TemplateOptions(), notes))
    return text, [note for note in notes if note.startswith("messages")]


@pytest.mark.parametrize("name", STUBBORN)
def test_a_template_gets_each_text_call_and_result_once_and_in_order(name: str) -> None:
    for conversation, chat in CONVERSATIONS.items():
        text, _ = rendered(template(name), chat)
        assert (conversation, missing(chat, text)) == (conversation, [])


def test_the_check_of_a_prompt_notices_what_is_lost_repeated_or_moved() -> None:
    chat = [system("a1"), user("b1"), says("", "c1", "c2"), result("c2", "d2"), user("e1")]
    assert missing(chat, "b1 c1 c2 d2 e1 a1") == missing(chat, "a1 b1 c2 d2 c1 e1") == []
    assert missing(chat, "b1 c1 c2 d2 e1") == ["no a1"]
    assert missing(chat, "a1 b1 c1 d2 e1") == ["0 of c2"]
    assert missing(chat, "a1 b1 b1 c1 c2 d2 e1") == ["2 of b1"]
    assert missing(chat, "a1 b1 c1 c2 e1 d2") == ["e1 too early"]


def test_a_template_that_takes_all_gets_the_chat_as_it_is() -> None:
    for chat in CONVERSATIONS.values():
        is_answer = chat[-1]["role"] == "assistant" and "tool_calls" not in chat[-1]
        expected = "".join(map(as_it_is, chat)) + ("" if is_answer else "<assistant>")
        assert rendered(template("takes all"), chat) == (expected, [])


def as_it_is(message: Message) -> str:
    calls = [json.dumps(each["function"]["arguments"]) for each in message.get("tool_calls", ())]
    return f"<{message['role']}>{message.get('content') or ''}{''.join(f'[{c}]' for c in calls)}"


def test_each_rewriting_is_the_one_that_some_template_needs() -> None:
    """Nothing is changed that need not be: each is somewhere the only one."""
    alone: set[str] = set()
    for name in STUBBORN:
        for chat in CONVERSATIONS.values():
            notes = rendered(template(name), chat)[1]
            alone |= set(notes) if len(notes) == 1 else set()
    noted = {f"messages ({each.note}, for the model's chat template)" for each in BY_PREFERENCE}
    assert alone == noted


WITH_CALLS = (
    *("takes all", "turns", "one call in a turn"),
    *("one call in a turn, without its text", "the first call is rendered, and results need one"),
)


@pytest.mark.parametrize("name", WITH_CALLS)
def test_calls_become_text_in_no_chat_of_a_template_that_has_them(name: str) -> None:
    """A model would learn from them to write its calls as text."""
    for conversation, chat in CONVERSATIONS.items():
        noted = rendered(template(name), chat)[1]
        assert (conversation, [note for note in noted if "assistant's text" in note]) == (
            conversation,
            [],
        )


GROWING = [
    *(system("rule1w"), user("place1w"), user("ask1w"), says("note1w", "call1w", "call2w")),
    *(result("call1w", "result1w"), result("call2w", "result2w"), user("reminder1w")),
    *(says("", "call3w"), result("call3w", "result3w"), says("answer1w"), user("ask2w")),
    *(system("rule2w"), says("answer2w"), user("ask3w")),
]
CHANGING = {
    "the system message is in a user's last turn",  # the template's own doing
    "turns, and text beside calls is lost",  # empty turns are needed once an answer follows
}
ENDS = [
    number
    for number, message in enumerate(GROWING, 1)
    if message["role"] in ("user", "tool") and GROWING[number:][:1] != [GROWING[6]]
]


@pytest.mark.parametrize("name", sorted(STUBBORN.keys() - CHANGING))
def test_a_conversation_that_grows_keeps_the_beginning_of_its_prompt(name: str) -> None:
    """Or no prefix cache would match. What comes last in a turn of a user may be joined later."""
    one = template(name)
    prompts = [rendered(one, GROWING[:end])[0].removesuffix("<assistant>") for end in ENDS]
    for shorter, longer in pairwise(prompts):
        assert longer.startswith(shorter)


def test_images_stay_in_turns_of_the_user() -> None:
    shown: Message = {"role": "user", "content": IMAGE}
    chat = [user("a"), says("", "b"), result("b", "c"), shown]
    assert fold_texts_into_results(chat) == chat
    text, notes = rendered(template("turns"), chat)
    assert "seen" in text and len(notes) == 1 and "empty turns" in notes[0]


def test_results_follow_the_calls_that_they_answer() -> None:
    chat = [says("x", "1", "2", "3"), result("3", "c"), result("9", "other"), result("1", "a")]
    assert list(split_calls([*chat, user("u")])) == [
        *(says("x", "1"), result("1", "a"), says("", "2")),
        *(says("", "3"), result("3", "c"), result("9", "other"), user("u")),
    ]


def test_short_ids_are_equal_where_the_ids_are() -> None:
    calls, two, one = CONVERSATIONS["ids of another server"][1:]
    calls, two, one = shorten_ids([calls, two, one])
    ids = [call["id"] for call in calls["tool_calls"]]
    assert ids == [one["tool_call_id"], two["tool_call_id"]]
    assert len(set(ids)) == 2 and all(re.fullmatch("[0-9a-z]{9}", id) for id in ids)
    calls, one, two = shorten_ids(CONVERSATIONS["no ids at all"][1:])
    ids = [call["id"] for call in calls["tool_calls"]]
    assert ids == [one["tool_call_id"], two["tool_call_id"]]


def test_joined_turns_keep_calls_thoughts_and_what_else_they_have() -> None:
    first, second = says("a", reasoning_content="t"), says("b", "1", reasoning_content="s")
    together = {**second, "content": "a\n\nb", "reasoning_content": "t\n\ns"}
    assert join_neighbours([first, second]) == [together]
    assert join_neighbours([second, first]) == [second, first], "it would precede the call"


def test_a_template_that_refuses_everything_is_tried_a_bounded_number_of_times() -> None:
    chat = [message for each in CONVERSATIONS.values() for message in each]
    tries: list[int] = []

    def faults(turns: Sequence[Message]) -> float:
        tries.append(len(turns))
        return math.inf

    assert needed_rewritings(MarkedChat(chat).messages, faults) == []
    assert len(tries) <= 1 + 2 * len(BY_PREFERENCE)


def test_a_template_that_refuses_everything_says_why() -> None:
    one = template_of("{{ raise_exception('never ' + messages | length | string) }}")
    with pytest.raises(InvalidRequest, match="never 2"):
        _ = rendered(one, CONVERSATIONS["two users"])


def test_a_template_that_refuses_the_marks_alone_gets_the_chat_as_it_is() -> None:
    """One that looks into a text: a rewriting would be no reaction to the chat."""
    one = template_of(
        "{{ messages[0].content.split('ask')[1] }}{% for m in messages[1:] %}|{% endfor %}"
    )
    assert rendered(one, CONVERSATIONS["two users"]) == ("1w|", [])


def test_a_slow_template_is_tried_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 0.2  # of each try
        return now[0]

    monkeypatch.setattr("time.process_time", clock)
    renderings: list[object] = []
    apply: Any = vars(ChatTemplate)["_apply"]

    def counted(*arguments: Any, **options: Any) -> str:
        renderings.append(arguments)
        return apply(*arguments, **options)

    monkeypatch.setattr(ChatTemplate, "_apply", counted)
    with pytest.raises(InvalidRequest):
        _ = rendered(template_of("{{ raise_exception('no') }}"), GROWING)
    assert len(renderings) <= 6


SCHEMAS = (
    "{% for t in tools %}{% set f = t.function %}{{ f.description + f.name }}"
    "{% for n, p in f.parameters.properties.items() %}{{ n + p.type + p.description }}"
    "{% if 'enum' in p %}{{ p.enum | tojson }}{% endif %}{% endfor %}"
    "{{ f.parameters.required | join(',') }}{% endfor %}" + STUBBORN["takes all"]
)


def test_a_template_that_cannot_read_a_schema_gets_a_plainer_one() -> None:
    notes: list[str] = []
    one = template_of(SCHEMAS)
    chat = CONVERSATIONS["one round"]
    text = "".join(one.render(chat, ODD_TOOLS, TemplateOptions(), notes))
    assert missing(chat, text) == []
    assert notes == ["tools (schemas became plainer, for the model's chat template)"]
    assert all(tool["function"]["name"] in text for tool in ODD_TOOLS)
    notes.clear()
    _ = one.render(chat, TOOLS, TemplateOptions(), notes)
    assert notes == []


def test_a_plainer_schema_keeps_what_the_schema_has() -> None:
    assert plainer_tool(TOOLS[0]) == {
        **TOOLS[0],
        "function": {
            **TOOLS[0]["function"],
            "parameters": {**TOOLS[0]["function"]["parameters"], "description": ""},
        },
    }
    deep: dict[str, Any] = {}
    for _ in range(200):
        deep = {"type": ["null", "object"], "properties": {"a": deep}}
    tool = {"type": "function", "function": {"name": "n", "parameters": deep}}
    assert str(plainer_tool(tool)).count("'object'") == 32

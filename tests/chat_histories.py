"""Conversations that OpenAI's and Anthropic's APIs allow, each word of which stands there once.

`missing` says what a prompt lacks of one, repeats or has in another order.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks at a place.",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string", "description": "Where."}},
                "required": ["place"],
            },
        },
    }
]
_ODD_PARAMETERS: list[dict[str, Any]] = [
    {},
    {"type": "object"},
    {"type": "object", "properties": {"a": {}, "b": True}},
    {"type": "object", "properties": {"a": {"type": ["string", "null"]}}},
    {"type": "object", "properties": {"a": {"enum": [1, "x", None]}}},
    {
        "type": "object",
        "properties": {
            "a": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/b"}]},
            "items": {"type": "array"},
        },
        "$defs": {"b": {"type": "string"}},
    },
]
ODD_TOOLS: list[dict[str, Any]] = [
    *TOOLS,
    *(
        {
            "type": "function",
            "function": {"name": f"odd{number}", "description": "", "parameters": parameters},
        }
        for number, parameters in enumerate(_ODD_PARAMETERS)
    ),
]


def user(word: str) -> Message:
    return {"role": "user", "content": word}


def system(word: str) -> Message:
    return {"role": "system", "content": word}


def call_id(call: str) -> str:
    """Nine letters or digits, as Mistral's templates want them."""
    return f"i{''.join(filter(str.isdigit, call)):0>8}"


def says(word: str, *calls: str, **fields: Any) -> Message:
    """An assistant's turn with calls whose argument is a word."""
    listed = [
        {
            "id": call_id(call),
            "type": "function",
            "function": {"name": "look", "arguments": {"place": call}},
        }
        for call in calls
    ]
    turn = {"role": "assistant", "content": word, **fields}
    return {**turn, "tool_calls": listed} if calls else turn


def with_ids(message: Message, *ids: str | None) -> Message:
    """The message with other ids of its calls."""
    calls = zip(message["tool_calls"], ids, strict=True)
    return {**message, "tool_calls": [{**call, "id": id} for call, id in calls]}


def result(call: str, word: str) -> Message:
    return {"role": "tool", "content": word, "tool_call_id": call_id(call)}


ROUND = [user("ask1w"), says("", "call1w"), result("call1w", "result1w")]
CONVERSATIONS: Mapping[str, Sequence[Message]] = {
    "plain": [system("rule1w"), user("ask1w"), says("answer1w"), user("ask2w")],
    "two users": [user("ask1w"), user("ask2w")],
    "three users, later": [
        *(system("rule1w"), user("ask1w"), says("answer1w")),
        *(user("ask2w"), user("ask3w"), user("ask4w")),
    ],
    "an environment first": [
        *(system("rule1w"), system("rule2w"), user("place1w"), user("ask1w")),
        *(says("", "call1w"), result("call1w", "result1w")),
    ],
    "one round": ROUND,
    "two rounds": [
        *(system("rule1w"), *ROUND, says("", "call2w"), result("call2w", "result2w")),
        *(says("answer1w"), user("ask2w")),
    ],
    "a reminder after a result": [*ROUND, user("reminder1w")],
    "reminders after results": [
        *(system("rule1w"), *ROUND, user("reminder1w"), says("", "call2w")),
        *(result("call2w", "result2w"), user("reminder2w"), says("answer1w"), user("ask2w")),
    ],
    "an interrupted tool": [user("ask1w"), says("", "call1w"), user("stop1w")],
    "an interrupted tool, later": [
        *(user("ask1w"), says("note1w", "call1w"), user("stop1w"), says("answer1w"), user("ask2w"))
    ],
    "two interrupted tools": [user("ask1w"), says("", "call1w", "call2w"), user("stop1w")],
    "the first of two tools was interrupted": [
        *(user("ask1w"), says("", "call1w", "call2w"), result("call2w", "result2w")),
        *(user("stop1w"), says("answer1w"), user("ask2w")),
    ],
    "the last of three tools was interrupted, and another one": [
        *(user("ask1w"), says("note1w", "call1w", "call2w", "call3w", reasoning_content="Hm.")),
        *(result("call1w", "result1w"), result("call2w", "result2w"), user("stop1w")),
        *(says("", "call4w"), user("ask2w")),
    ],
    "an assistant first": [says("answer1w"), user("ask1w")],
    "an assistant first, after a system message": [
        *(system("rule1w"), says("answer1w"), user("ask1w"), says("answer2w"), user("ask2w"))
    ],
    "a call first": [says("", "call1w"), result("call1w", "result1w"), user("ask1w")],
    "two assistants": [user("ask1w"), says("answer1w"), says("answer2w"), user("ask2w")],
    "an empty assistant": [user("ask1w"), says(""), user("ask2w")],
    "a blank assistant": [
        user("ask1w"),
        says(" \n"),
        user("ask2w"),
        says("answer1w"),
        user("ask3w"),
    ],
    "thoughts alone": [user("ask1w"), says("", reasoning_content="Hm."), user("ask2w")],
    "two calls in a turn": [
        *(user("ask1w"), says("", "call1w", "call2w")),
        *(result("call1w", "result1w"), result("call2w", "result2w")),
    ],
    "three calls, results in another order": [
        *(system("rule1w"), user("ask1w"), says("", "call1w", "call2w", "call3w")),
        *(result("call3w", "result3w"), result("call1w", "result1w"), result("call2w", "result2w")),
        *(says("answer1w"), user("ask2w")),
    ],
    "results without ids": [
        *(user("ask1w"), says("", "call1w", "call2w")),
        *({"role": "tool", "content": word} for word in ("result1w", "result2w")),
    ],
    "ids of another server": [
        *(user("ask1w"), with_ids(says("note1w", "call1w", "call2w"), "call_Ab1", "call_Cd2")),
        {**result("call2w", "result2w"), "tool_call_id": "call_Cd2"},
        {**result("call1w", "result1w"), "tool_call_id": "call_Ab1"},
    ],
    "no ids at all": [
        *(user("ask1w"), with_ids(says("", "call1w", "call2w"), None, None)),
        *({"role": "tool", "content": word} for word in ("result1w", "result2w")),
    ],
    "calls in turns of their own, results after them": [
        *(user("ask1w"), says("", "call1w"), says("", "call2w")),
        *(result("call1w", "result1w"), result("call2w", "result2w")),
    ],
    "text beside calls": [
        *(user("ask1w"), says("note1w", "call1w"), result("call1w", "result1w")),
        *(says("answer1w"), user("ask2w")),
    ],
    "text and thoughts beside two calls, and a reminder": [
        *(system("rule1w"), user("ask1w")),
        says("note1w", "call1w", "call2w", reasoning_content="Hm."),
        *(result("call1w", "result1w"), result("call2w", "result2w"), user("reminder1w")),
    ],
    "text after calls": [
        *(user("ask1w"), says("", "call1w"), says("note1w"), result("call1w", "result1w"))
    ],
    "a call last": [user("ask1w"), says("", "call1w")],
    "a system message late": [
        *(system("rule1w"), user("ask1w"), says("answer1w"), user("ask2w"), system("rule2w"))
    ],
    "a system message late, and none first": [
        *(user("ask1w"), says("answer1w"), system("rule1w"), user("ask2w"))
    ],
    "a system message after a result": [*ROUND, system("rule2w")],
    "a system message alone": [system("rule1w")],
    "a system message and an answer to continue": [system("rule1w"), says("answer1w")],
    "an answer to continue": [user("ask1w"), user("ask2w"), says("answer1w")],
    "answers to continue": [user("ask1w"), says("answer1w"), says("answer2w")],
    "a result that lost its call": [
        *(user("ask1w"), result("call1w", "result1w"), says("answer1w"), user("ask2w"))
    ],
    "an empty result": [*ROUND[:2], result("call1w", ""), user("reminder1w")],
    "null content": [
        *(user("ask1w"), {**says("", "call1w"), "content": None}, result("call1w", "result1w"))
    ],
    "no content": [
        user("ask1w"),
        {name: value for name, value in says("", "call1w").items() if name != "content"},
        result("call1w", "result1w"),
    ],
    "a call without arguments": [
        user("ask1w"),
        {
            **says(""),
            "tool_calls": [
                {"id": "000000001", "type": "function", "function": {"name": "n", "arguments": {}}}
            ],
        },
        {"role": "tool", "content": "result1w", "tool_call_id": "000000001"},
    ],
    "an image that is absent": [
        user("[an image was here; this node reads text only]ask1w"),
        *(
            says("", "call1w"),
            result("call1w", "[an image was here; this node reads text only]w1w"),
        ),
    ],
}


def missing(messages: Sequence[Message], prompt: str) -> list[str]:
    """What a prompt lacks, repeats or has in another order.

    A first system message may stand anywhere; a call and its result precede the next turn, in any
    order with other calls of their turn.
    """
    faults, end, open_end = list[str](), 0, 0
    for number, message in enumerate(messages):
        words = list(_words(message))
        for word in words:
            count = prompt.count(word)
            if number == 0 and message["role"] == "system":
                faults += [] if count else [f"no {word}"]
                continue
            if count != 1:
                faults.append(f"{count} of {word}")
                continue
            place = prompt.index(word)
            if place < end:
                faults.append(f"{word} too early")
            open_end = max(open_end, place)
        if not (message.get("tool_calls") or _next_role(messages, number) == "tool"):
            end = open_end
    return faults


def _next_role(messages: Sequence[Message], number: int) -> str:
    return messages[number + 1]["role"] if number + 1 < len(messages) else ""


def _words(message: Message) -> "itertools.chain[str]":
    content: str = message.get("content") or ""
    calls: Sequence[Message] = message.get("tool_calls", ())
    return itertools.chain(
        [content.split("]")[-1].strip()] if content.strip() else [],
        (call["function"]["arguments"]["place"] for call in calls if call["function"]["arguments"]),
    )

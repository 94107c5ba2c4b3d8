"""The texts of the commands as a person reads them, whole; a pipe gets them without wrapping."""

from collections.abc import Mapping
from typing import Any

import pytest

from exo_node.node.cli.failures import CommandFailed
from exo_node.node.cli.join import nodes_text
from exo_node.node.cli.models import model_text, recommendation_text
from exo_node.node.cli.output import table
from exo_node.node.cli.status import placement_row, status_text

Json = Mapping[str, Any]

# ---------------------------------------------------------------------------- tables

_LONG = "mlx-community/Qwen3.8-122B-A10B-Instruct-MLX-4bit with a reason of several words " * 4


def test_without_a_width_nothing_is_wrapped_or_cut() -> None:
    header, row = table(("MODEL", "WHY"), [("a", _LONG)])
    assert (header, row) == ("MODEL  WHY", f"a      {_LONG.rstrip()}")


def test_a_width_wraps_the_widest_cells_and_loses_nothing() -> None:
    rows = [("a" * 9, "ok", "of three words")]
    assert table(("MODEL", "STATUS", "WHY"), rows, width=28) == [
        "MODEL      STATUS  WHY",
        "aaaaaaaaa  ok      of three",
        "                   words",
    ]


def test_a_cell_cannot_draw_on_the_terminal_and_wide_characters_keep_the_columns() -> None:
    rows = [("\x1b[2J", "[red]x[/]"), ("模型", "y")]
    assert table(("MODEL", "WHY"), rows) == ["MODEL    WHY", r"\x1b[2J  [red]x[/]", "模型     y"]


# ---------------------------------------------------------------------------- status


def test_status_says_how_many_tokens_are_drafted_and_why() -> None:
    drafting = {
        "drafter_kind": "native_mtp",
        "num_draft_tokens": 3,
        "draft_policy": "adaptive",
        "depth_reason": "begins with K = 1: the model's default",
    }
    row = placement_row({"model": "demo", "drafting": drafting}, {})
    assert row[-1] == "on, up to 3 a round; begins with K = 1: the model's default"


def test_status_shows_the_bits_of_quantised_caches() -> None:
    state = {"model": "demo", "status": "ready"}
    assert placement_row(state | {"kv_bits": 8}, {})[1] == "ready, caches of 8 bits"
    assert placement_row(state | {"kv_bits": None}, {})[1] == "ready"
    assert placement_row(state | {"tokens_per_second": 9.5}, {})[1] == "ready, about 9.5 tok/s"


_COPIES = {"enabled": True, "reason": ""}
_NO_COPIES = {"enabled": False, "reason": "2 stages"}
_HEAD = {"drafter_kind": "native_mtp", "num_draft_tokens": 3, "draft_policy": "fixed"}
_NO_HEAD = {"drafter_kind": "none", "reason": "no head"}


@pytest.mark.parametrize(
    ("drafting", "copies", "words"),
    [
        (_NO_HEAD, None, "off: no head"),
        (_NO_HEAD, _COPIES, "copies only: no head"),
        (_NO_HEAD, _NO_COPIES, "off: no head; no copies: 2 stages"),
        (_HEAD, _COPIES, "on, 3 a round, and copies"),
        (_HEAD, _NO_COPIES, "on, 3 a round; no copies: 2 stages"),
    ],
)
def test_status_says_whether_drafts_are_copied(
    drafting: dict[str, Any], copies: dict[str, Any] | None, words: str
) -> None:
    row = placement_row({"model": "m", "drafting": drafting | {"prompt_lookup": copies}}, {})
    assert row[-1] == words


_TOTALS = {
    "requests": 12,
    "prompt_tokens": 400,
    "cached_tokens": 100,
    "completion_tokens": 50,
    "batched_tokens": 40,
    "proposed_draft_tokens": 30,
    "accepted_draft_tokens": 20,
}
_STAGE: dict[str, Any] = {}
_FAILED = {"model": "m", "status": "failed", "error": "no memory", "stages": [_STAGE]}


@pytest.mark.parametrize(
    ("cluster", "placements", "answered", "expected"),
    [
        (
            {},
            [],
            {},
            """\
node     - (-), http://-:-, exo-node -
head     -, term -
cluster  -, 0 nodes

NODE  STATUS  CHIP  BACKEND  MEMORY  ADDRESS

no model is loaded; `exo-node chat` loads one""",
        ),
        (
            {"nodes": [{"id": "n", "name": "a", "stages": [{"model": "new"}]}]}
            | {"offline": "EXO_OFFLINE", "trouble": "no\ndisk"},
            [_FAILED, {"model": "demo", "drafting": {"num_draft_tokens": 2}}],
            {"demo": _TOTALS, "new": {}},
            r"""node     - (-), http://-:-, exo-node -
head     -, term -
cluster  -, 1 node
TROUBLE  no\x0adisk
offline  nothing is downloaded, by EXO_OFFLINE; models come from this disk and from peers

NODE  STATUS  CHIP  BACKEND  MEMORY  ADDRESS
a     -       -     -        -       -:-

MODEL  STATUS             STAGES  MTP
m      failed: no memory  - ?     -
demo   -                          on, 2 a round

ANSWERED HERE  ANSWERS  TOKENS  PROMPTS CACHED  SHARED STEPS  ACCEPTED
demo           12       50      25 %            80 %          67 %
new            -        -       -               -             -""",
        ),
    ],
    ids=["fields of another version are missing", "trouble, a failure, and answers"],
)
def test_status(
    cluster: Json, placements: list[Json], answered: Mapping[str, Json], expected: str
) -> None:
    assert status_text(cluster, placements, answered) == expected


# ---------------------------------------------------------------------------- nodes

_MEMBER = {
    "id": "n1", "name": "alpha", "host": "10.0.0.1", "port": 52416, "chip": "Apple M3 Max",
    "backend": "metal", "memory_bytes": 48 * 2**30, "status": "alive", "self": True, "head": True,
}  # fmt: skip
_MEMBERS = """\
NODE                ID  STATUS  CHIP          BACKEND  MEMORY   ADDRESS
alpha (self, head)  n1  alive   Apple M3 Max  metal    51.5 GB  10.0.0.1:52416"""
_REQUEST = {"name": "new", "node": "n2", "chip": "Apple M1", "address": "10.0.0.2"}


@pytest.mark.parametrize(
    ("joining", "expected"),
    [
        ({"data": []}, ""),
        (
            {"data": [{**_REQUEST, "at": {"name": "alpha"}}]},
            """

ASKS TO JOIN  ID  CHIP      FROM      AT
new           n2  Apple M1  10.0.0.2  alpha
type the six digits that its own screen shows: `exo-node approve DIGITS`""",
        ),
        (
            {"data": [_REQUEST, {**_REQUEST, "node": "n3"}]},
            """

ASKS TO JOIN  ID  CHIP      FROM      AT
new           n2  Apple M1  10.0.0.2  -
new           n3  Apple M1  10.0.0.2  -
type the six digits that its own screen shows: `exo-node approve DIGITS` NODE; its screen shows its id too, for where two have one name""",  # noqa: E501
        ),
        (
            {"asking": [{"name": "beta", "address": "10.0.0.3"}]},
            """

this node asks beta (10.0.0.3) to join; only its own user may see its digits""",
        ),
        (
            {"asking": [{"name": "b", "address": "1"}, {}], "digits": "123456", "node": "n1"},
            """

this node asks b (1) and - (-) to join, and shows 123 456
run exo-node approve 123 456 on a node of your cluster; where several ask there, this one's id is n1""",  # noqa: E501
        ),
    ],
    ids=["nothing", "one asks", "two ask", "another user", "this node asks"],
)
def test_nodes(joining: Json, expected: str) -> None:
    assert nodes_text({"nodes": [_MEMBER]}, joining) == _MEMBERS + expected


# ---------------------------------------------------------------------------- models

_FIT = {"nodes": 1, "needed_bytes": 1, "tokens_per_second": 9.0, "dtype": "bfloat16"}
_ENTRY: dict[str, Any] = {
    "id": "owner/large", "size_bytes": 27 * 10**9, "format": "4-bit", "context_length": 4096,
    "fits": _FIT, "mtp": "head found", "card": {"model_type": "qwen3", "num_layers": 64},
}  # fmt: skip


def test_a_model() -> None:
    variants = [{"repository": "owner/large-4bit", "bits": 4}]
    card = {**_ENTRY["card"], "num_experts": 8}
    fit = {**_FIT, "dtype_reason": "the checkpoint's"}
    sampling = {
        "temperature": {"value": 0.7, "source": "card"},
        "top_k": {"value": 20, "source": "generation_config.json"},
    }
    files = {"sampling": sampling, "notes": ["ignored: m/generation_config.json has top_p = 'x'"]}
    assert (
        model_text({**_ENTRY, "variants": variants, "card": card, "fits": fit, **files})
        == """\
model       owner/large
kind        qwen3, 64 layers, 8 experts
size        27.0 GB, 4-bit
context     4096 tokens
fits        yes, estimated 9 tokens a second
computes in bfloat16: the checkpoint's
native MTP  head found
sampling    temperature 0.7 (card), top_k 20 (generation_config.json)
notes       ignored: m/generation_config.json has top_p = 'x'
folder      not on this machine
quantised   owner/large-4bit (4-bit)"""
    )
    limited = {**_ENTRY, "native_mtp": {"depth_reason": "at most 4 of the model's 7"}}
    assert "native MTP  head found; at most 4 of the model's 7\n" in model_text(limited)
    assert (
        model_text({})
        == """\
model       -
kind        None, None layers
size        -, -
context     - tokens
fits        -
computes in -
native MTP  -
folder      not on this machine"""
    )


def test_recommendations() -> None:
    wider = {**_ENTRY, "id": "owner/huge", "fits": {**_FIT, "nodes": 2}, "drafts": True}
    assert (
        recommendation_text([{**_ENTRY, "downloaded": True}, wider])
        == """\
MODEL        SIZE     FORMAT  RUNS ON   TOKENS/S  NATIVE MTP  ON DISK
owner/large  27.0 GB  4-bit   one node  9.0       no          yes
owner/huge   27.0 GB  4-bit   2 nodes   9.0       yes         no

Speeds are estimates until a model has answered here.
`exo-node models pull owner/huge` gets it"""
    )
    assert recommendation_text([]).startswith("no model that exo-node has a card of fits")


@pytest.mark.parametrize(
    ("message", "remedy", "sentence"),
    [
        ("it cannot be searched, search again.", "try again in 30 s", "search again; try again in"),
        ("no node runs", "start one", "no node runs; start one"),
        ("still loading...", "wait", "still loading...; wait"),
        ("One. Two.", None, "One. Two."),
    ],
)
def test_a_remedy_follows_no_full_stop(message: str, remedy: str | None, sentence: str) -> None:
    assert sentence in CommandFailed(message, remedy=remedy).message

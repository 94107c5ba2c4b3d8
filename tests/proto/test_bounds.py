"""Numbers from the wire: any message through the real readers is taken, or refused by its field."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, cast

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulated import Disk

from exo_node.node.cluster.cluster import Cluster
from exo_node.node.cluster.cluster_state import ClusterState
from exo_node.node.cluster.desired import DesiredPlacements
from exo_node.node.cluster.member import MemberFacts
from exo_node.node.machine.events import EventLog
from exo_node.node.machine.tasks import Loops
from exo_node.node.machine.timing import LAN, LOCAL
from exo_node.node.rpc import control_server
from exo_node.node.rpc.channels import checked
from exo_node.node.rpc.control_server import PROTOCOL
from exo_node.placement.errors import ExoNodeError, InvalidFrame, InvalidRequest, PeerLost
from exo_node.placement.ids import NodeId
from exo_node.proto import peer_pb2 as pb
from exo_node.proto.bounds import MAX_COUNTER, fault
from exo_node.proto.checked_calls import BoundNumbers
from exo_node.shard.model.stage_limits import StageLimits
from exo_node.shard.pipeline.frames import (
    Assembler,
    BlockMember,
    HiddenBlock,
    Replayed,
    check_envelope,
    cut,
)

EVERY: Mapping[str, Descriptor] = pb.DESCRIPTOR.message_types_by_name
U64, U32 = 2**64 - 1, 2**32 - 1
INTEGERS = st.sampled_from((0, 1, 2, 3, 65_535, 65_536, U32))
LONG = INTEGERS | st.sampled_from((2**53, 2**53 + 1, 2**62, 2**62 + 1, 2**63, U64 - 1, U64))
REALS = st.sampled_from((0.0, -0.0, 1.0, -1.0, 1e300, math.inf, -math.inf, math.nan, 5e-324))
TEXTS = st.sampled_from(("", "a", "b", "p1", "r1", "x" * 300, "../x", "\x1b[31m", "{}"))
NODES = ("a", "b", "c")
CHECKS = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example)
KINDS: Mapping[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_UINT64: LONG,
    FieldDescriptor.CPPTYPE_UINT32: INTEGERS,
    FieldDescriptor.CPPTYPE_INT32: st.sampled_from((0, 1, -1, 2**31 - 1, -(2**31))),
    FieldDescriptor.CPPTYPE_DOUBLE: REALS,
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_ENUM: st.sampled_from((0, 1, 2, 3, 99, -1)),
}


@st.composite
def messages(draw: st.DrawFn, kind: Descriptor, depth: int = 3) -> Message:
    """Some fields of a message, with extreme numbers."""
    message = GetMessageClass(kind)()
    for field in kind.fields:
        if draw(st.integers(0, 2)):
            fill(draw, message, field, depth)
    return message


def fill(draw: st.DrawFn, message: Message, field: FieldDescriptor, depth: int) -> None:
    inner = field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        return
    if inner is not None:
        if depth:
            for _ in range(draw(st.integers(0, 2)) if field.is_repeated else 1):
                given_message = draw(messages(inner, depth - 1))
                at = getattr(message, field.name)
                (at.add() if field.is_repeated else at).CopyFrom(given_message)
        return
    values = value_of(field)
    if field.is_repeated:
        getattr(message, field.name).extend(draw(st.lists(values, max_size=3)))
    else:
        setattr(message, field.name, draw(values))


def value_of(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        if field.name in ("node", "head", "id", "peer"):
            return st.sampled_from(NODES)
        is_bytes = field.type == FieldDescriptor.TYPE_BYTES
        return st.binary(max_size=8) if is_bytes else TEXTS
    return KINDS[field.cpp_type]


def nobody(_: NodeId, __: str) -> None:
    pass


def node_b(_: object) -> NodeId:
    return NodeId("b")


class Refused(Exception):
    """Raised by `abort`, as in gRPC."""


class Context:
    """The context of a call by node b."""

    def __init__(self) -> None:
        self.status: grpc.StatusCode | None = None
        self.sent_back: dict[str, str] = {}

    def auth_context(self) -> dict[str, Any]:
        return {}

    def peer(self) -> str:
        return "ipv4:10.0.0.2:1"

    async def abort(self, status: grpc.StatusCode, text: str, metadata: Any) -> None:
        self.status, self.sent_back = status, {**dict(metadata), "text": text}
        raise Refused


class Nothing:
    """A client that reaches no node."""

    async def exchange(self, *_: Any) -> pb.Heartbeat:
        raise PeerLost("nobody is there")


class Node:
    """The heartbeats of `NodeCalls` over a real Cluster."""

    def __init__(self, events: EventLog | None = None) -> None:
        standing = ClusterState(NodeId("a"), 1000, Disk(), 0.0, LAN, wait_s=0.0)
        client: Any = Nothing()
        events = EventLog() if events is None else events
        self.cluster_state = standing
        self.cluster = Cluster(
            lambda: MemberFacts(pb.NodeFacts(id="a", name="a", host="127.0.0.1", port=1)),
            client,
            standing,
            nobody,
            events,
            DesiredPlacements(),
            Loops(events, LOCAL),
        )

    def answer_heartbeat(self, sender: NodeId, beat: pb.Heartbeat) -> pb.Heartbeat:
        return self.cluster.answer(sender, beat)

    def state(self) -> Any:
        """The state that a refused heartbeat must not change; asserts that it is valid JSON."""
        described = self.cluster.describe()
        _ = json.dumps(described, allow_nan=False)
        described["lease"].pop("head_for_s")
        return (
            described,
            self.cluster_state.membership.views(),
            self.cluster_state.membership.incarnation,
        )


async def checked_method(handler: Any) -> Any:
    """A method with the check that every server has."""

    async def service(_: Any) -> Any:
        return handler

    details: Any = type("Details", (), {"method": "/x/Method"})()
    return await BoundNumbers().intercept_service(service, details)


async def called(method: Callable[..., Any], request: Message, context: Context) -> Any:
    make: Any = grpc.unary_unary_rpc_method_handler
    return await (await checked_method(make(method))).unary_unary(request, context)


async def streamed(request: Message, context: Context) -> list[Message]:
    """The answers of a method that sends its request back, twice, behind that check."""

    async def echo(request: Message, _: Any) -> AsyncIterator[Message]:
        for _ in range(2):
            yield request

    make: Any = grpc.unary_stream_rpc_method_handler
    guarded = await checked_method(make(echo))
    return [answer async for answer in guarded.unary_stream(request, context)]


def test_a_request_for_a_stream_is_checked_before_its_method_sees_it() -> None:
    within, beyond = pb.View(node="a", incarnation=1), pb.View(node="a", incarnation=U64)
    assert asyncio.run(streamed(within, Context())) == [within, within]
    context = Context()
    with pytest.raises(Refused):
        _ = asyncio.run(streamed(beyond, context))
    assert context.status == grpc.StatusCode.INVALID_ARGUMENT
    assert context.sent_back["exo-param"] == "incarnation"


# ------------------------------------------------------------------------- any message


@pytest.mark.parametrize("name", sorted(EVERY))
def test_any_message_is_taken_or_refused_by_a_field_of_it(name: str) -> None:
    @settings(max_examples=15, deadline=None, suppress_health_check=CHECKS)
    @given(messages(EVERY[name]))
    def story(message: Message) -> None:
        out_of_bounds = fault(message)
        if out_of_bounds is not None:
            assert out_of_bounds.field.split(".")[0] in EVERY[name].fields_by_name
            with pytest.raises(InvalidRequest) as caught:
                _ = checked(message, "it")
            assert caught.value.param == out_of_bounds.field
        else:
            assert checked(message, "it") is message

    story()


def numbers(kind: Descriptor) -> list[tuple[FieldDescriptor, Any]]:
    """Each number of a message, at what its type has for the largest or for nonsense."""
    worst = {
        FieldDescriptor.CPPTYPE_UINT64: U64,
        FieldDescriptor.CPPTYPE_DOUBLE: math.nan,
    }
    return [(f, worst[f.cpp_type]) for f in kind.fields if f.cpp_type in worst]


@pytest.mark.parametrize("name", sorted(EVERY))
def test_no_number_of_64_bits_is_without_a_bound(name: str) -> None:
    for field, value in numbers(EVERY[name]):
        if (name, field.name) == ("Sampling", "seed"):
            continue  # any seed is one
        message = GetMessageClass(EVERY[name])()
        if field.is_repeated:
            getattr(message, field.name).append(value)
        else:
            setattr(message, field.name, value)
        out_of_bounds = fault(message)
        assert out_of_bounds is not None and out_of_bounds.field == field.name, field.name


def test_the_sentence_names_the_field_its_value_and_its_bound() -> None:
    beat = pb.Heartbeat(views=[pb.View(node="a", incarnation=U64)])
    out_of_bounds = fault(beat)
    assert out_of_bounds is not None
    assert (out_of_bounds.field, str(U64) in out_of_bounds.text) == ("views.incarnation", True)
    with pytest.raises(InvalidRequest, match=r"b sent views\.incarnation"):
        _ = checked(beat, "b")
    biased = pb.Sampling(logit_bias={1: math.nan})
    assert fault(biased) is not None
    assert fault(pb.Sampling(logit_bias={1: -100.0}, seed=U64)) is None


# ----------------------------------------------------------------------------- heartbeats


@settings(max_examples=40, deadline=None, suppress_health_check=CHECKS)
@given(st.lists(messages(EVERY["Heartbeat"], 2), min_size=1, max_size=4))
def test_any_heartbeats_leave_a_cluster_that_continues(beats: list[Message]) -> None:
    asyncio.run(hears(beats))


async def hears(beats: list[Message], *, refused: bool | None = None) -> Node:
    """Each is answered or refused; one that is refused changes nothing."""
    node = Node()
    service: Any = control_server._MembershipService(cast(Any, node))  # pyright: ignore[reportPrivateUsage]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control_server, "authenticated_node", node_b)
        now = 0.0
        for each in beats:
            beat = pb.Heartbeat()
            beat.CopyFrom(cast(pb.Heartbeat, each))
            beat.protocol, beat.sender.id = PROTOCOL, "b"
            before, context = node.state(), Context()
            try:
                answer = await called(service.Exchange, beat, context)
            except (Refused, ExoNodeError) as fault:
                assert refused is not False, (fault, context.sent_back)
                if isinstance(fault, Refused):
                    assert context.sent_back["text"] and context.sent_back["exo-code"]
                assert node.state() == before
            else:
                assert refused is not True
                assert pb.Heartbeat.FromString(answer.SerializeToString()).sender.id == "a"
            now += 1.0
            _ = node.cluster_state.tick(now)
            _ = node.state()
    await node.cluster.close()
    return node


@pytest.mark.parametrize(
    "change",
    [
        {"term": U64, "head": "b"},
        {"incarnation": U64},
        {"boot_id": U64},
        {"views": [pb.View(node="a", incarnation=U64, status=pb.VIEW_STATUS_DEAD)]},
        {"head_for_s": math.nan},
        {"sender": pb.NodeFacts(port=65_536)},
        {"sender": pb.NodeFacts(memory_bytes=U64)},
        {"sender": pb.NodeFacts(memory_bandwidth=math.inf)},
        {"sender": pb.NodeFacts(profiles=[pb.LayerTimes(decode_s=-1.0)])},
        {"placements": [pb.StageState(weight_bytes=U64)]},
        {"desired": [pb.DesiredPlacement(context=U64)]},
    ],
    ids=lambda change: "-".join(change),
)
def test_a_heartbeat_that_ended_clusters_is_refused(change: dict[str, Any]) -> None:
    _ = asyncio.run(hears([pb.Heartbeat(**change)], refused=True))


def test_the_highest_numbers_that_pass_leave_room_for_what_follows_from_them() -> None:
    high = pb.Heartbeat(
        term=MAX_COUNTER,
        head="b",
        incarnation=MAX_COUNTER,
        views=[pb.View(node="a", incarnation=MAX_COUNTER, status=pb.VIEW_STATUS_SUSPECT)],
    )
    node = asyncio.run(hears([high] * 3, refused=False))
    own = node.cluster.answer(NodeId("b"), pb.Heartbeat(leaving=True))
    assert fault(own) is None


# --------------------------------------------------------------------------------- frames

EXPECTED = StageLimits(
    placement="p1",
    stage=1,
    dtype="float32",
    hidden_size=4,
    max_rows=8,
    context_length=64,
    vocabulary=16,
)


BLOCKS = {
    "a round": HiddenBlock(
        (BlockMember("r1", 1, 3), BlockMember("r2", 2, 9)), 1, (1, 2), pb.REPLY_ALL, bytes(2 * 16)
    ),
    "a chunk": HiddenBlock(
        (BlockMember("r1", 1, 3),),
        2,
        (1, 2),
        pb.REPLY_COMPUTED,
        bytes(2 * 16),
        border=pb.BORDER_KEPT,
    ),
    "a log": HiddenBlock(
        (BlockMember("r1", 1, 3),),
        3,
        (1, 2, 3),
        pb.REPLY_COMPUTED,
        bytes(3 * 16),
        (Replayed(2, 1), Replayed(1, 1)),
    ),
}


@st.composite
def changed(draw: st.DrawFn, block: HiddenBlock) -> pb.Frame:
    """Its frame with one field, of it or of what is inside it, at random."""
    (frame,) = cut(block, "p1", 1, "float32", 4)
    inner = [*frame.hidden.members, *frame.hidden.replayed]
    place: Any = draw(st.sampled_from([frame, frame.hidden, frame.hidden, *inner]))
    field = draw(st.sampled_from([f for f in place.DESCRIPTOR.fields if f.name != "hidden"]))
    if draw(st.booleans()):
        place.ClearField(field.name)
    fill(draw, place, field, 1)
    return frame


@pytest.mark.parametrize("what", BLOCKS)
def test_a_good_frame_with_one_field_at_random_becomes_a_sound_block_or_is_refused_by_name(
    what: str,
) -> None:
    @settings(max_examples=80, deadline=None, suppress_health_check=CHECKS)
    @given(changed(BLOCKS[what]))
    def story(frame: pb.Frame) -> None:
        try:
            check_envelope(frame, EXPECTED)
            if frame.WhichOneof("kind") != "hidden":
                return
            block = Assembler(EXPECTED).add(frame)
        except InvalidFrame as refusal:
            first, _, rest = str(refusal.param).partition(".")
            assert first in EVERY["Frame"].fields_by_name
            kinds = {"hidden": "Hidden", "prefix": "PrefixQuery", "copies": "CopyQuery"}
            assert not rest or rest.split(".")[0] in EVERY[kinds[first]].fields_by_name
            return
        if block is not None:  # data may be short of what would complete it
            assert len(block.data) == 16 * block.rows * len(block.members)
            assert len(block.tokens) == block.rows * len(block.members)
            assert max(block.tokens) < EXPECTED.vocabulary
            assert all(m.position + block.rows <= 64 and m.attempt for m in block.members)
            assert 1 <= block.kept_rows <= block.rows
            assert len({m.request for m in block.members}) == len(block.members)

    story()

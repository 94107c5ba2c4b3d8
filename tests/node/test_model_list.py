"""The list of models of a cluster that is made up."""

import asyncio
from types import SimpleNamespace
from typing import Any

from exo_node.node.cluster.member import MemberFacts
from exo_node.node.model_list import ModelList
from exo_node.proto import peer_pb2 as pb

ABSENT: Any = None


def node(name: str, **reasons: str) -> MemberFacts:
    """A node with models, each with why it deletes none of its files."""
    copies = [pb.HeldModel(model=model, kept_reason=why) for model, why in reasons.items()]
    return MemberFacts(pb.NodeFacts(id=name, name=name, models=[*reasons], held_models=copies), [])


def listed(*others: MemberFacts) -> dict[str, Any]:
    """The models of the list, by id."""
    members = [SimpleNamespace(id=each.facts.id, facts=each.facts) for each in others]
    cluster: Any = SimpleNamespace(self_id="own", members=lambda: members)
    library: Any = SimpleNamespace(scan=dict, broken={}, partial={})
    placements: Any = SimpleNamespace(records=[])
    models = asyncio.run(ModelList(library, placements, cluster, ABSENT, 0).on_disk())
    return {each["id"]: each for each in models}


def test_a_model_that_no_holder_deletes_says_why_and_any_other_may_be_asked_for() -> None:
    mine = "/srv/m is a folder of yours"
    models = listed(
        node("mac-1", folder=mine, cache="", both=mine, one=""),
        node("mac-2", both="another program brought it", one=mine),
    )
    kept = {name: model["kept"] for name, model in models.items()}
    reason = f"on mac-1: {mine}"
    assert kept == {"folder": reason, "cache": None, "both": reason, "one": None}

"""`bench/drafting_clients.py` runs: an engine without text answers clients at once, both kinds."""

import argparse
from dataclasses import replace
from typing import Any, cast

import drafting_clients as bench
from readers import loaded
from shape_engine import NoText

from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.compute import ComputeThread
from exo_node.shard.engine.options import EngineOptions


def test_clients_of_both_kinds_are_answered_with_the_same_ids() -> None:
    options = argparse.Namespace(model="small", prompt=30, tokens=12)
    compute = ComputeThread()

    def plan() -> TextEngine:
        limits = EngineOptions("float32", 4096, 64, max_draft_tokens=bench.MAX_K)
        return TextEngine(replace(loaded(), codec=cast(Any, NoText())), limits)

    try:
        engine = compute.submit(plan).result()
        runs = {
            kind: bench._run(compute, engine, bench._requests(options, 3, 0, kind))  # pyright: ignore[reportPrivateUsage]
            for kind in bench.KINDS
        }
    finally:
        compute.close()
    assert {run.tokens for run in runs.values()} == {36}
    text = {kind: run.summary() for kind, run in runs.items()}
    assert sum(text["default"]["rounds_by_k"][1:]) > 0 == sum(text["K=0"]["rounds_by_k"][1:])
    ids = [tuple(tuple(client.ids) for client in run.clients) for run in runs.values()]
    assert ids[0] == ids[1]

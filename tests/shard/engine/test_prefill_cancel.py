"""A request that is cancelled while its prompt is read ends within one more chunk."""

import threading
from concurrent.futures import Future
from typing import Any

from engines import engine_of, load_quietly, request
from small import small_spec

from exo_node.mtp.steps import Prefilled
from exo_node.shard.engine.compute import ComputeThread, Run
from exo_node.shard.engine.engine import TextEngine

CHUNK, ROWS = 64, 640
SOON_S = 120.0


def test_a_cancelled_prompt_computes_no_more_than_the_chunk_under_way() -> None:
    wanted = small_spec(prefill_chunk=CHUNK)
    thread = ComputeThread()
    try:
        engine: TextEngine = thread.submit(lambda: engine_of(load_quietly(wanted), wanted)).result(
            SOON_S
        )
        read, over, run = list[int](), threading.Event(), Future[Run]()

        def deliver(event: Any) -> None:
            if isinstance(event, Prefilled):
                read.append(event.done)
                if event.done == CHUNK:
                    run.result(SOON_S).cancel()

        prompt = [7 * i % 4000 + 3 for i in range(ROWS)]
        run.set_result(
            thread.drive(engine.generate(request(prompt)), deliver, lambda _: over.set())
        )
        assert over.wait(SOON_S), "it did not end"
        assert CHUNK in read
        assert max(read) <= 2 * CHUNK
        assert thread.submit(engine.cache_bytes).result(SOON_S) == 0
    finally:
        thread.close()

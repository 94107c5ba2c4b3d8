"""Requests that do not have room together."""

from typing import Any

from engines import answer, engine_of, load_quietly, request, spec
from readers import Reader, together
from small import small_checkpoint


def test_answers_that_do_not_fit_together_come_one_after_the_other() -> None:
    """And each is what it is alone."""
    fields: dict[str, Any] = {"num_layers": 6, "native_mtp": True, "context_length": 128}
    stage_spec = spec(small_checkpoint(6), 0, 6, **fields)
    served = engine_of(load_quietly(stage_spec), stage_spec)
    engine_requests = [request(list(range(5, 85)), 2, 20, ignore_eos=True) for _ in range(4)]
    readers = [Reader(each) for each in engine_requests[1:]]
    ended = list[Reader]()

    def look(_: int) -> None:
        ended.extend(r for r in readers if r.end is not None and r not in ended)
        assert served.live_requests <= 1

    together(served, readers, look)
    assert [readers.index(each) for each in ended] == [0, 1, 2]
    alone = answer(served, engine_requests[0]).ids
    assert [tuple(each.ids) for each in readers] == [alone] * 3

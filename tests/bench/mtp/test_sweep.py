"""The engine of a benchmark, in this process."""

from engines import answer, request
from small import small_spec

from exo_node_bench.mtp.sweep import open_model


def test_a_repeated_prompt_is_read_again_although_the_node_keeps_prompts() -> None:
    """Or its time to the first token would be that of a prompt that is there already."""
    _, engine = open_model(small_spec(prefix_cache_bytes=1 << 26, prefill_chunk=16))
    prompt = range(5, 60)  # several chunks: what is kept of a prompt ends with one
    stats = [answer(engine, request(prompt, 0, 2)).stats for _ in range(2)]
    assert [each.cached_tokens for each in stats] == [0, 0]

"""Several stages in one process: the same ids, the same bytes, and nothing left behind."""

from engines import answer, load_quietly, request, spec, split_engine
from small import PROMPT, small_checkpoint

from exo_node.proto import peer_pb2 as pb


def test_each_stage_reads_and_holds_only_its_own_layers() -> None:
    _, _, loaded = split_engine((0, 6, 16))
    whole = load_quietly(spec())
    assert sum(stage.weight_bytes for stage in loaded) == whole.weight_bytes
    generator, second = loaded
    assert second.weight_bytes < generator.weight_bytes + whole.weight_bytes // 2
    for stage in loaded:
        # float32 in memory, bfloat16 on disk; what else is read is headers and the tokenizer.
        assert stage.checkpoint_bytes_read < stage.weight_bytes // 2 + 800_000


def test_prompt_chunks_ask_for_no_answer_and_the_last_for_one_row() -> None:
    replies: list[int] = []
    engine, _, _ = split_engine(
        (0, 2, 4),
        lambda frame: replies.append(frame.hidden.reply),
        small_checkpoint(),
        prefill_chunk=4,
    )
    assert len(PROMPT) == 13
    _ = answer(engine, request(PROMPT, max_tokens=2))
    assert replies == [pb.REPLY_COMPUTED] * 3 + [pb.REPLY_LAST, pb.REPLY_ALL]

"""Every kind of cache moves from one engine to another, from memory and from disk."""

from pathlib import Path

import pytest
from engines import answer
from prefixes import IDS, KINDS, ROOM, of_class, plain, probabilities
from stored_prefixes import files, settle
from transfers import handed_over


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_cache_moves(kind: str, tmp_path: Path) -> None:
    source, target = of_class(kind, ROOM), of_class(kind, ROOM)
    _ = answer(source, plain(IDS[0]))
    got = handed_over(source, target, plain(IDS[1]))
    assert got.stats.cached_tier == "peer" and got.stats.cached_tokens > 128
    assert probabilities(got) == probabilities(answer(of_class(kind, ROOM), plain(IDS[1])))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_cache_moves_from_the_files_of_several_turns(
    kind: str, tmp_path: Path
) -> None:
    for prompt in IDS[:2]:
        source = of_class(kind, ROOM, tmp_path)
        _ = answer(source, plain(prompt))
        settle(source)
    assert len(files(tmp_path)) == 2
    got = handed_over(of_class(kind, ROOM, tmp_path), of_class(kind, ROOM), plain(IDS[1]))
    assert got.stats.cached_tier == "peer"
    assert probabilities(got) == probabilities(answer(of_class(kind, ROOM), plain(IDS[1])))

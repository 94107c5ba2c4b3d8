"""A load's measurements are reused if nothing that decides it changed, and only there."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from small import small_engine
from test_probe import subject_of
from tiny import taped_qwen

from exo_node.mtp.pieces import result_of
from exo_node.mtp.probe import LONGEST_PROBED
from exo_node.mtp.targets import FamilyTarget
from exo_node.shard.engine.answers import probing
from exo_node.shard.engine.answers.draft_profile import (
    DraftProfile,
    DraftProfileKey,
    MeasuredIdentity,
)
from exo_node.shard.engine.answers.probing import (
    probe_batch_identity,
    probe_identity,
    probe_shared_copies,
)

KEY = DraftProfileKey("chip", "f" * 64, "float32", "0.32.4", 0)


@pytest.fixture(scope="module")
def model() -> Any:
    return taped_qwen(dtype="float32")


def profile_in(folder: Path) -> DraftProfile:
    return DraftProfile.open(str(folder), KEY, lambda: 100.0)


def test_an_identity_is_measured_once_and_outlives_the_process(model: Any, tmp_path: Path) -> None:
    first = profile_in(tmp_path)
    assert result_of(probe_identity(subject_of(model, context=64), 2, first)).value == "bitwise"
    # Another value than would be measured now, so that a second measurement would show.
    first.identity = MeasuredIdentity(value="near_tie", k=2, context_length=64)
    first.save()
    again = profile_in(tmp_path)
    assert result_of(probe_identity(subject_of(model, context=64), 2, again)).value == "near_tie"


@pytest.mark.parametrize(("k", "context"), [(3, 64), (1, 64), (2, 128)])
def test_another_k_or_context_is_measured_anew(
    model: Any, tmp_path: Path, k: int, context: int
) -> None:
    profile = profile_in(tmp_path)
    profile.identity = MeasuredIdentity(value="near_tie", k=2, context_length=64)
    assert result_of(probe_identity(subject_of(model, context=context), k, profile)).depth == k
    assert profile.identity == MeasuredIdentity(value="bitwise", k=k, context_length=context)


def test_contexts_beyond_the_longest_that_is_probed_share_what_was_measured(
    model: Any, tmp_path: Path
) -> None:
    """A context that follows the free memory is another one at each load."""
    profile = profile_in(tmp_path)
    profile.identity = MeasuredIdentity(value="near_tie", k=2, context_length=LONGEST_PROBED)
    for context in (LONGEST_PROBED, 32_768, 262_144):
        subject = subject_of(model, context=context)
        assert result_of(probe_identity(subject, 2, profile)).value == "near_tie"
        profile.batch_identity = profile.identity
        assert result_of(probe_batch_identity(subject, 2, profile)).value == "near_tie"


def test_a_remembered_identity_has_no_pieces(model: Any, tmp_path: Path) -> None:
    profile = profile_in(tmp_path)
    profile.identity = MeasuredIdentity(value="bitwise", k=3, context_length=64)
    profile.batch_identity = profile.identity
    subject = subject_of(model, context=64)
    assert not list(probe_identity(subject, 3, profile))
    assert not list(probe_batch_identity(subject, 3, profile))


def test_a_limit_outlives_the_process_and_files_without_one_mean_none(tmp_path: Path) -> None:
    profile = profile_in(tmp_path)
    profile.identity = MeasuredIdentity.of(4, 7, 64, " (a part)")
    profile.save()
    again = profile_in(tmp_path).identity
    assert again == MeasuredIdentity.of(4, 7, 64, " (a part)")
    assert (profile.identity.value, profile.identity.depth) == ("bitwise", 4)
    of_old = MeasuredIdentity.model_validate_json('{"value":"bitwise","k":3,"context_length":64}')
    assert of_old == MeasuredIdentity.of(3, 3, 64) and of_old.depth == 3
    near_tie = MeasuredIdentity.of(None, 3, 64)
    assert (near_tie.value, near_tie.depth) == ("near_tie", 3)


def test_batches_are_measured_again_where_there_is_memory_for_more_rows(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds have no more rows than were measured, in a later load with more memory too."""
    kept, before, rounds = profile_in(tmp_path), None, list[int]()
    forward = FamilyTarget.forward_batch

    def noted(self: FamilyTarget, tokens: mx.array, caches: Any) -> Any:
        rounds.append(tokens.size)
        return forward(self, tokens, caches)

    monkeypatch.setattr(FamilyTarget, "forward_batch", noted)
    room = 0
    monkeypatch.setattr(probing, "rows_to_probe", lambda _: room)  # pyright: ignore[reportUnknownLambdaType]
    for rows, measured in ((32, 32), (16, 32), (32, 32), (48, 48)):
        room, subject = rows, subject_of(model, context=64)
        pieces = list(probe_batch_identity(subject, 3, kept))
        copies = result_of(probe_shared_copies(subject, (3, 15), kept))
        assert kept.batch_identity is not None
        assert kept.batch_identity.rows == copies.rows == measured == max(rounds)
        assert bool(pieces) == (kept.batch_identity is not before)
        before = kept.batch_identity
        assert probing.sizes_of(3, 16, measured) == (3, measured // 4)


def test_choosing_is_tried_as_a_model_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    served, tried = small_engine(native_mtp=False, batching=False), list[object]()

    def tries(*args: object) -> list[None]:
        tried.append(args)
        return []

    monkeypatch.setattr("exo_node.shard.engine.answers.model_measurements.choose_first", tries)
    served.measurements.measure()
    assert tried == [(4096, 0, mx.float32)]

"""Layer times that answers correct: what moves them, what does not, and what is kept."""

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from exo_node.node.links.layer_profiles import VOTES, LayerProfiles
from exo_node.placement.cluster import NOISE
from exo_node.proto import peer_pb2 as pb

LAYERS = 4
_FACTORS = st.floats(1e-3, 1e3)


def times(decode_s: float = 1e-2, tail_s: float = 5e-3) -> pb.LayerTimes:
    return pb.LayerTimes(
        model="m",
        dtype="float32",
        decode_s=decode_s,
        verify_s=2 * decode_s,
        verify_rows=4,
        prefill_s=10 * decode_s,
        prefill_rows=512,
        tail_s=tail_s,
        layer_bytes=1000,
    )


def spec(
    *, stages: int = 1, dtype: str = "float32", checkpoint: str = "f", layers: int = LAYERS
) -> pb.StageSpec:
    return pb.StageSpec(
        checkpoint_sha256=checkpoint,
        dtype=dtype,
        num_stages=stages,
        first_layer=0,
        end_layer=layers,
    )


def opened(folder: str | Path, measured: pb.LayerTimes | None = None) -> LayerProfiles:
    profiles = LayerProfiles(Path(folder), "M4, metal", "1")
    if measured is not None:
        profiles.store("f", measured)
    return profiles


def step_s(profiles: LayerProfiles) -> float:
    """A plain step of the whole model, as it is predicted."""
    [known] = profiles.times()
    return LAYERS * known.decode_s + known.tail_s


TRUE = LAYERS * 1e-2 + 5e-3


@settings(deadline=None)
@given(_FACTORS)
def test_any_wrong_measurement_is_corrected_by_the_second_answer(factor: float) -> None:
    with TemporaryDirectory() as folder:
        profiles = opened(folder, times(factor * 1e-2, factor * 5e-3))
        for _ in range(2):
            profiles.correct(spec(), TRUE)
        assert abs(step_s(profiles) / TRUE - 1) <= NOISE + 1e-9
        [known] = opened(folder).times()
        assert known == profiles.times()[0], "it outlives the process"
        assert abs(known.verify_s / known.decode_s - 2) < 1e-9


def test_a_measurement_that_was_too_slow_is_corrected_by_the_first_answer(tmp_path: Path) -> None:
    profiles = opened(tmp_path, times(0.3))
    profiles.correct(spec(), TRUE)
    assert abs(step_s(profiles) / TRUE - 1) <= NOISE


@settings(deadline=None)
@given(_FACTORS, st.integers(0, VOTES))
def test_one_odd_answer_among_others_moves_nothing(odd: float, place: int) -> None:
    with TemporaryDirectory() as folder:
        profiles = opened(folder, times())
        answers = [TRUE] * VOTES
        answers.insert(place, odd * TRUE)
        for number, answer in enumerate(answers):
            profiles.correct(spec(), answer)
            # Before any other answer a faster one is all that there is beside the measurement.
            if odd > 1 or number > 1 or place != 0:
                assert abs(step_s(profiles) / TRUE - 1) <= NOISE


@settings(deadline=None)
@given(st.lists(st.floats(1 - NOISE / 2, 1 + NOISE / 2), max_size=30))
def test_answers_within_the_noise_change_nothing(factors: list[float]) -> None:
    with TemporaryDirectory() as folder:
        profiles = opened(folder, times())
        for factor in factors:
            profiles.correct(spec(), factor * TRUE)
        assert profiles.times() == [times()]


def test_a_stage_is_corrected_by_its_layers_without_the_tail(tmp_path: Path) -> None:
    profiles = opened(tmp_path, times())
    profiles.correct(spec(stages=2), LAYERS * 1e-2)
    assert profiles.times() == [times()]
    for _ in range(3):
        profiles.correct(spec(stages=2), LAYERS * 2e-2)
    assert abs(profiles.times()[0].decode_s / 2e-2 - 1) < 1e-9


def test_a_new_measurement_begins_without_earlier_answers(tmp_path: Path) -> None:
    profiles = opened(tmp_path, times())
    for _ in range(VOTES):
        profiles.correct(spec(), 3 * TRUE)
    profiles.store("f", times())
    profiles.correct(spec(), 3 * TRUE)
    assert profiles.times() == [times()]


def test_nonsense_and_strangers_correct_nothing(tmp_path: Path) -> None:
    profiles = opened(tmp_path, times())
    for seconds in (0.0, -1.0, float("nan"), float("inf"), 1e18, 5e-324, 1e-300):
        for _ in range(2 * VOTES):
            profiles.correct(spec(), seconds)
    strangers = [spec(dtype="bfloat16"), spec(checkpoint="g"), spec(checkpoint="")]
    for stranger in (*strangers, spec(stages=2, layers=0), spec(layers=0)):
        for _ in range(2):
            profiles.correct(stranger, 1e-6)
    assert profiles.times() == [times()]
    for seconds in (1e-9, 3600.0):
        for _ in range(VOTES):
            profiles.correct(spec(), seconds)
        assert opened(tmp_path).times() == profiles.times(), "the file is one that is read"


def test_what_drafts_gain_is_kept_and_changes_beyond_the_noise(tmp_path: Path) -> None:
    profiles = opened(tmp_path, times())
    gains = list[float]()
    for gain in (0.0, 1.5, 1.5 * (1 + NOISE / 2), 1.0, 0.5, 9.5, float("nan"), float("inf")):
        profiles.correct(spec(), 0.0, gain)
        gains.append(profiles.times()[0].mtp_speedup)
    assert gains == [0.0, 1.5, 1.5, *[1.0] * 5]
    for _ in range(3):
        profiles.correct(spec(), 3 * TRUE, 0.0)
    [known] = opened(tmp_path).times()
    assert known.mtp_speedup == 1.0
    assert abs(known.decode_s / 3e-2 - 1) <= NOISE

"""Estimates for models that a node has not measured, by those that it has."""

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from exo_node.placement.cluster import ClusterView, MeasuredLayer, NodeFacts
from exo_node.placement.cost import lent, pace_of
from exo_node.placement.ids import NodeId

GB = 10**9
_BYTES = st.integers(1, 10**12)
_SECONDS = st.floats(1e-9, 3600)
_LAYERS = st.builds(MeasuredLayer, _BYTES, _SECONDS, st.just("float32"))


def node(*measured: MeasuredLayer, id: str = "a", bandwidth: float = 100e9) -> NodeFacts:
    return NodeFacts(
        NodeId(id), id, 64 * GB, bandwidth, "cpu", measured=tuple(sorted(set(measured)))
    )


def layer(nbytes: int, seconds: float, dtype: str = "float32") -> MeasuredLayer:
    return MeasuredLayer(nbytes, seconds, dtype)


def test_without_measurements_bytes_and_bandwidth_decide() -> None:
    assert pace_of(node()).seconds(GB) == 0.01
    assert pace_of(node(bandwidth=math.nan)).seconds(GB) == 0.02


def test_a_small_model_shows_what_every_layer_takes() -> None:
    pace = pace_of(node(layer(1000, 4e-4)))
    assert math.isclose(pace.seconds(1000), 4e-4, rel_tol=1e-3)
    assert math.isclose(pace.seconds(GB), 4e-4 + 0.01, rel_tol=1e-3)


def test_a_small_model_on_a_busy_machine_tells_nothing_of_the_bandwidth() -> None:
    pace = pace_of(node(layer(5_000_000, 0.02)))
    assert math.isclose(pace.seconds(GB), 0.03, rel_tol=0.01)


def test_a_large_model_shows_how_much_of_the_bandwidth_is_reached() -> None:
    pace = pace_of(node(layer(GB, 0.04)))
    assert math.isclose(pace.seconds(2 * GB), 0.08, rel_tol=0.05)
    assert pace.seconds(1) < 1e-6, "all of it is for its bytes"


def test_both_together_are_right_for_both() -> None:
    pace = pace_of(node(layer(1000, 4e-4), layer(GB, 0.04)))
    assert math.isclose(pace.seconds(1000), 4e-4, rel_tol=0.01)
    assert math.isclose(pace.seconds(GB), 0.04, rel_tol=0.01)
    assert 0.02 < pace.seconds(GB // 2 + GB // 8) < 0.03


@given(_LAYERS)
def test_an_estimate_of_the_measured_layer_itself_is_its_measurement(
    measured: MeasuredLayer,
) -> None:
    estimate = pace_of(node(measured)).seconds(measured.nbytes)
    assert math.isclose(estimate, measured.seconds, rel_tol=1e-6)


@given(st.lists(_LAYERS, max_size=5), _BYTES, _BYTES)
def test_every_estimate_is_a_time_and_more_bytes_take_no_less(
    measured: list[MeasuredLayer], a: int, b: int
) -> None:
    pace = pace_of(node(*measured))
    small, large = pace.seconds(min(a, b)), pace.seconds(max(a, b))
    assert 0 <= small <= large < math.inf


def test_a_node_that_measured_nothing_is_not_weighed_by_its_data_sheet() -> None:
    known, new = node(layer(GB, 0.04)), node(id="b", bandwidth=200e9)
    gpu = replace(node(id="c", bandwidth=400e9), backend="metal")
    first, second, third = lent([known, new, gpu])
    assert first == known
    assert third == gpu, "another backend reaches another share"
    assert math.isclose(pace_of(second).seconds(GB), 0.02, rel_tol=1e-6)
    assert lent([new, gpu]) == (new, gpu)


def test_layers_in_the_same_dtype_count_before_others() -> None:
    both = node(layer(GB, 0.04), layer(GB, 0.08, "bfloat16"))
    view = ClusterView((both,))
    assert [each.dtype for each in view.measured_in("bfloat16").nodes[0].measured] == ["bfloat16"]
    assert [each.dtype for each in view.measured_in("float32").nodes[0].measured] == ["float32"]
    single = ClusterView((node(layer(GB, 0.04)),))
    assert single.measured_in("bfloat16").nodes[0].measured, "better than a data sheet"

"""The CUDA kernels' own text, run by an emulator on a CPU, or on the GPU where there is one.

`make test-gpu` runs these where MLX computes on an NVIDIA GPU, at the sizes of real models.
"""

import subprocess
from pathlib import Path

import mlx.core as mx
import pytest
from emulated import built, compiler, use
from kernel_cases import delta_case, product_case

from exo_node.mtp.caches.rollback import RowChoice, kept_row_index
from exo_node.shard.kernels import gated_delta, product
from exo_node.shard.kernels.cuda import available
from exo_node.shard.kernels.trial import relative_error

TOLERANCE = {mx.float32: 2e-6, mx.float16: 2e-3, mx.bfloat16: 1.2e-2}
ON_GPU = available()
_SMALL_DELTAS = (
    gated_delta.Sizes(1, 2, 64, mx.float32),
    gated_delta.Sizes(1, 2, 128, mx.bfloat16),
)
_SMALL_PRODUCTS = (
    product.Weights(36, 260, mx.float32),
    product.Weights(4, 800, mx.bfloat16),
    product.Weights(32, 2560, mx.bfloat16, 4, 64),
    product.Weights(16, 1024, mx.float16, 4, 128),
    product.Weights(48, 512, mx.bfloat16, 4, 32),
    product.Weights(1, 384, mx.bfloat16, 8, 64),
    product.Weights(20, 1152, mx.float16, 8, 32),
    product.Weights(34, 384, mx.bfloat16, 8, 128),
)
_REAL_DELTAS = tuple(gated_delta.Sizes(16, heads, 128, mx.bfloat16) for heads in (32, 48))
_REAL_PRODUCTS = (
    product.Weights(1740, 5120, mx.bfloat16),
    product.Weights(512, 17408, mx.bfloat16, 4, 64),
    product.Weights(24832, 5120, mx.bfloat16, 4, 64),
    product.Weights(1740, 5120, mx.bfloat16, 4, 32),
    product.Weights(1740, 5120, mx.bfloat16, 8, 64),
    product.Weights(512, 17408, mx.float16, 8, 128),
)
DELTAS = (*_SMALL_DELTAS, *(_REAL_DELTAS if ON_GPU else ()))
PRODUCTS = (*_SMALL_PRODUCTS, *(_REAL_PRODUCTS if ON_GPU else ()))


@pytest.fixture(autouse=True)
def kernels_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(tmp_path, monkeypatch)


@pytest.mark.parametrize("sizes", DELTAS, ids=str)
def test_a_layers_rows_are_those_of_plain_operations_and_of_single_steps(
    sizes: gated_delta.Sizes,
) -> None:
    case, kernel = delta_case(sizes, batch=2, rows=5), gated_delta.GatedDelta(sizes)
    y, window, states = kernel.rows(*case.inputs, case.before, case.layer, case.state)
    expected, last = case.reference()
    assert relative_error(expected, y) <= TOLERANCE[sizes.dtype]
    assert relative_error(last, states[-1]) <= TOLERANCE[sizes.dtype]
    assert mx.array_equal(window, mx.concatenate([case.before, case.inputs[0]], axis=1)).item()
    state, before = case.state, case.before
    for i in range(2):
        row = case.row(i)
        one, moved, after = kernel.rows(*row, before, case.layer, state)
        assert mx.array_equal(one[:, 0], y[:, i]).item()
        assert mx.array_equal(after[0], states[i]).item()
        state, before = after[0], moved[:, 1:]


@pytest.mark.smoke
@pytest.mark.parametrize("sizes", DELTAS, ids=str)
def test_a_kernel_continues_from_the_row_that_each_request_keeps(
    sizes: gated_delta.Sizes,
) -> None:
    case, kernel = delta_case(sizes, batch=2, rows=5), gated_delta.GatedDelta(sizes)
    _, window, states = kernel.rows(*case.inputs, case.before, case.layer, case.state)
    row_counts = mx.array([4, 2])
    chosen = RowChoice(window, states, kept_row_index(row_counts))
    last, state = (a for a in chosen.arrays() if a is not None)
    assert mx.array_equal(last, mx.stack([window[0, 4:7], window[1, 2:5]])).item()
    assert mx.array_equal(state, mx.stack([states[3, 0], states[1, 1]])).item()
    row = case.row(4)
    got = kernel.rows(*row, window, case.layer, states, chosen.at)
    expected = kernel.rows(*row, mx.contiguous(last), case.layer, state)
    for ours, copied in zip(got, expected, strict=True):
        assert mx.array_equal(ours, copied).item()


@pytest.mark.parametrize("sizes", DELTAS, ids=str)
def test_many_rows_are_those_of_fewer_up_to_the_end_of_each_sequence(
    sizes: gated_delta.Sizes,
) -> None:
    """Three pieces of rows, behind a row of an earlier forward that each sequence keeps."""
    first, case = delta_case(sizes, batch=2, rows=5), delta_case(sizes, batch=2, rows=35)
    kernel, (qkv, z, b, a) = gated_delta.GatedDelta(sizes), case.inputs
    _, window, states = kernel.rows(*first.inputs, first.before, case.layer, first.state)
    chosen = RowChoice(window, states, kept_row_index(mx.array([4, 2])))
    ends = [35, 18]
    got = kernel.rows(
        qkv, z, b, a, window, case.layer, states, chosen.at, mx.array(ends, dtype=mx.int32)
    )
    before, state = (mx.contiguous(array) for array in chosen.arrays() if array is not None)
    expected_window, ys, all_states = mx.concatenate([before, qkv], axis=1), [], []
    for at in (slice(16), slice(16, 32), slice(32, 35)):
        piece = [each[:, at] for each in case.inputs]
        y, moved, after = kernel.rows(*piece, before, case.layer, state)  # pyright: ignore
        before, state = moved[:, -3:], after[-1]
        ys.append(y)
        all_states.append(after)
    y, after = mx.concatenate(ys, axis=1), mx.concatenate(all_states)
    for n, end in enumerate(ends):
        assert mx.array_equal(got[0][n, :end], y[n, :end]).item()
        assert mx.array_equal(got[1][n, : end + 3], expected_window[n, : end + 3]).item()
        assert mx.array_equal(got[2][n], after[end - 1, n]).item()


@pytest.mark.parametrize("sizes", DELTAS, ids=str)
def test_a_prompts_recurrence_is_that_of_plain_operations(
    sizes: gated_delta.Sizes,
) -> None:
    case = delta_case(sizes, batch=1, rows=37)
    kernel, (q, k, v) = gated_delta.GatedDelta(sizes), case.heads()
    _, _, b, a = case.inputs
    got = kernel.recurrence(q, k, v, a, b, case.layer, case.state)
    expected = gated_delta.reference(q, k, v, a, b, case.layer, case.state)
    for ours, stock in zip(got, expected, strict=True):
        assert relative_error(stock, ours) <= 1e-4


def _unchanged(cut: product.Cut, **_: int) -> product.Cut:
    return cut


@pytest.mark.parametrize("four_warps", [False, True])
@pytest.mark.parametrize("weights", PRODUCTS, ids=str)
def test_a_products_rows_are_right_and_do_not_depend_on_their_number(
    weights: product.Weights, four_warps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if four_warps:  # x in the ring with the weights, blocks of twice the features
        monkeypatch.setattr(product, "_HALF_THE_WARPS", range(1 << 20))
        monkeypatch.setattr(product, "_MANY_FEATURES", 1)
    if not ON_GPU:  # each kernel has no more shared memory than its launch asks for
        monkeypatch.setattr(product, "replace", _unchanged)
    layer, x, expected = product_case(weights, rows=40)
    assert product.weights_of(layer) == weights and product.unfit(weights) == ""
    kernel = product.product_for(weights)
    whole = kernel(x, layer)
    assert relative_error(expected, whole) <= TOLERANCE[weights.dtype]
    for rows in (1, 3, 5, 9, 17):
        assert mx.array_equal(kernel(x[:, :rows], layer), whole[:, :rows]).item()


def test_blocks_have_the_shared_memory_that_their_rings_and_sums_need() -> None:
    storage = product.Storage(mx.bfloat16, 4, 64)
    for rows in (1, 16):
        down = storage.cut("added", rows, 5120, 17_408)
        assert down == product.Cut(warps=8, tiles=1, wide=1, ring_rows=0)
        assert storage.shared_bytes(down, 1) == 8 * 2 * 16 * 176
    for rows in (1, 8):
        gated = storage.cut("gated", rows, 17_408, 5120)
        assert gated == product.Cut(warps=4, tiles=1, wide=1, ring_rows=rows)
        assert storage.shared_bytes(gated, 2) == 4 * 2 * (32 * 176 + rows * 528)
    lm_head = storage.cut("product", 64, 248_320, 5120)
    assert lm_head == product.Cut(warps=4, tiles=4, wide=2, ring_rows=0)
    assert storage.shared_bytes(lm_head, 1) == 4 * 2 * 32 * 176
    expert = storage.cut("experts_gated", 3, 512, 512)  # a step is 256 numbers
    assert expert == product.Cut(warps=2, tiles=1, wide=1, ring_rows=0)


@pytest.mark.parametrize("inputs", [512, 5120, 17_408])
def test_the_warps_of_a_product_follow_from_the_size_of_a_row_alone(inputs: int) -> None:
    storage = product.Storage(mx.bfloat16, 4, 64)
    calls = ("product", "added", "several", "gated")
    cuts = [
        storage.cut(call, rows, features, inputs)
        for call in calls
        for rows in (1, 5, 16, 64)
        for features in (48, 20_000)
    ]
    assert len({cut.warps for cut in cuts}) == 1 and len(set(cuts)) > 2


def test_a_kernel_that_changed_is_compiled_again(tmp_path: Path) -> None:
    if compiler() is None:
        pytest.skip("the emulator needs g++")
    file = tmp_path / "kernel.cuh"
    programs = list[Path]()
    for status in (3, 4):
        _ = file.write_text(f"constexpr int STATUS = {status};\n")
        programs.append(built(f'#include "{file}"\nint main() {{ return STATUS; }}\n'))
    assert [subprocess.run([program]).returncode for program in programs] == [3, 4]

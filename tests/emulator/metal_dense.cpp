// argv: inputs, outputs, rows. From generation 15 on: one row by gemv, 2 to 15 by gemv_wide.
#include "metal.h"
template <class I = int64_t> I elem_to_loc(uint, const int*, const int64_t*, int) { return 0; }
inline ulong2 elem_to_loc_broadcast(uint, const int*, const int64_t*, const int64_t*, int) {
  return {};
}
#include "gemv.h"
#include "metal_rows.h"

int inputs, outputs;

template <int SIMD_ROWS, int SIMD_COLUMNS, int OUTPUTS> void one(const float* w, const float* x, float* y) {
  launch({over(outputs, SIMD_ROWS * OUTPUTS), 1, 1}, 32 * SIMD_ROWS * SIMD_COLUMNS, [&] {
    GEMVKernel<float, SIMD_ROWS, SIMD_COLUMNS, 1, 32, OUTPUTS, 4, false>::run(
        w, x, nullptr, y, inputs, outputs, inputs, 1.0f, 0.0f, 0, (float*)dynamic_shared, block(),
        uint3{lane(), simdgroup(), 0}, simdgroup(), lane());
  });
}

template <int LANES> void some(const float* w, const float* x, float* y, int rows, int passes) {
  with_constant<2, 5>(over(rows, over(rows, 5)), [&](auto tile) {
    launch({passes, over(outputs, 4), 1}, LANES * 4, [&] {
      GemvWide<float, decltype(tile)::value, LANES>::run(
          w, x, nullptr, y, inputs, outputs, rows, inputs, inputs, 1.0f, 0.0f, 0, 0, block(),
          uint3{(uint)gridDim.x, (uint)gridDim.y, 1}, simdgroup(), lane());
    });
  });
}

void product(const float* w, const float* x, float* y, int rows) {
  const bool is_deep = inputs >= 16 * outputs, is_broad = outputs >= 4096;
  const int passes = over(rows, 5);
  if (rows > 1 && (passes == 1 || outputs <= 64)) some<32>(w, x, y, rows, passes);
  else if (rows > 1) some<16>(w, x, y, rows, outputs >= 65536 ? 1 : passes);
  else if (outputs < 4) is_deep ? one<1, 8, 1>(w, x, y) : one<4, 1, 1>(w, x, y);
  else if (is_deep) one<1, 8, 4>(w, x, y);
  else if (is_broad) one<8, 1, 4>(w, x, y);
  else one<4, 1, 4>(w, x, y);
}

int main(int, char** argv) {
  inputs = atoi(argv[1]);
  outputs = atoi(argv[2]);
  const int most = atoi(argv[3]);
  const auto w = numbers((size_t)inputs * outputs, 1, 1 / 32.0f), x = numbers((size_t)most * inputs, 2);
  print_rows(most, [&](int first, int rows) {
    std::vector<float> y((size_t)rows * outputs, NAN);
    product(w.data(), x.data() + (size_t)first * inputs, y.data(), rows);
    return y;
  });
}

// argv: size of a head, query heads of the one key head, the first row's position, rows, size of the
// GPU. A call's last row sees all keys. Rows of calls that begin at that position, and each row alone.
#include "metal.h"
template <class T> struct Limits {
  static constexpr T finite_min = -3.4028234663852886e38f;
};
#include "sdpa_vector.h"
#include "metal_rows.h"

int heads;
char gpu;  // s: Max, d: Ultra, g: other

struct Passes {
  int parts;  // 0: one pass
  bool by_group;
};
Passes passes_of(int size, int rows, int keys) {
  const int simdgroups = heads * rows;
  const bool is_large = gpu == 's' || gpu == 'd';
  if (!(is_large && keys >= 1024) && !(heads > 1 && keys >= 4096)) return {0, false};
  int parts = simdgroups >= 4 ? 64 : 32;
  if (gpu == 's') {
    parts = 64;
    if (keys > 1024 && simdgroups > 4) parts = keys <= 8192 ? 128 : keys <= 32768 ? 256 : keys <= 65536 ? 512 : 1024;
  } else if (gpu == 'd') {
    parts = 128;
    if (simdgroups <= 2 && keys > 8192) parts = 256;
    if (simdgroups >= 6 && keys >= 16384) parts = keys < 65536 ? 512 : 1024;
  }
  const bool by_group = rows == 1 && keys >= 8192 &&
      ((heads == 8 && (size == 64 || size == 128)) || ((heads == 12 || heads == 16) && size == 128));
  return {parts, by_group};
}

template <int SIZE>
std::vector<float> attention(const float* q, const float* k, const float* v, int rows, int keys) {
  const size_t head = (size_t)keys * SIZE, row = SIZE;
  const float scale = 1.0f / sqrtf(SIZE);
  const Passes passes = passes_of(SIZE, rows, keys);
  do_causal = rows > 1;
  blocks = passes.parts;
  std::vector<float> out((size_t)heads * rows * SIZE, NAN);
  if (!passes.parts) {
    launch({heads, rows, 1}, 1024, [&] {
      sdpa_vector<float, SIZE>(q, k, v, out.data(), heads, keys, head, row, head, row, scale, nullptr,
                               nullptr, 0, 0, 0, nullptr, heads, block(),
                               uint3{(uint)heads, (uint)rows, 1}, simdgroup(), lane());
    });
    return out;
  }
  std::vector<float> part(out.size() * blocks, NAN), sums(heads * rows * blocks), most(sums);
  const uint3 grid{1, 1, (uint)blocks};
  if (passes.by_group)
    with_constant<2, 4>(heads / 4, [&](auto four) {
      constexpr int GROUP = 4 * decltype(four)::value;
      launch({1, 1, blocks}, 32 * GROUP, [&] {
        sdpa_vector_2pass_1_gqa<float, SIZE, SIZE, GROUP, 4>(
            q, k, v, part.data(), sums.data(), most.data(), keys, head, row, head, row, scale, block(),
            grid, uint3{lane(), simdgroup(), 0}, lane());
      });
    });
  else
    launch({1, 1, blocks}, 32 * heads * rows, [&] {
      const uint group = simdgroup() % heads, at = simdgroup() / heads;
      sdpa_vector_2pass_1<float, SIZE>(
          q, k, v, part.data(), sums.data(), most.data(), keys, head, row, head, row, scale, nullptr,
          nullptr, 0, 0, 0, nullptr, uint3{32, (uint)heads, (uint)rows}, uint3{lane(), group, at}, block(),
          grid, lane());
    });
  launch({heads, rows, 1}, 1024, [&] {
    sdpa_vector_2pass_2<float, SIZE>(part.data(), sums.data(), most.data(), out.data(), blocks, block(),
                                     uint3{(uint)heads, (uint)rows, 1}, simdgroup(), lane());
  });
  return out;
}

template <int SIZE> void print_attention(int position, int most) {
  const int all = position + most;
  const auto q = numbers((size_t)most * heads * SIZE, 1);
  const auto k = numbers((size_t)all * SIZE, 2), v = numbers((size_t)all * SIZE, 3);
  print_rows(most, [&](int first, int rows) {
    std::vector<float> queries((size_t)heads * rows * SIZE), out(queries);  // by head, then by row
    for (int r = 0; r < rows; ++r)
      for (int h = 0; h < heads; ++h)
        memcpy(&queries[(h * rows + r) * SIZE], &q[((first + r) * heads + h) * SIZE], SIZE * sizeof(float));
    const auto made = attention<SIZE>(queries.data(), k.data(), v.data(), rows, position + first + rows);
    for (int r = 0; r < rows; ++r)
      for (int h = 0; h < heads; ++h)
        memcpy(&out[(r * heads + h) * SIZE], &made[(h * rows + r) * SIZE], SIZE * sizeof(float));
    return out;
  });
}

int main(int, char** argv) {
  heads = atoi(argv[2]);
  gpu = *argv[5];
  const int position = atoi(argv[3]), most = atoi(argv[4]);
  switch (atoi(argv[1])) {
    case 64: print_attention<64>(position, most); break;
    case 128: print_attention<128>(position, most); break;
    case 256: print_attention<256>(position, most); break;
    default: return 5;
  }
}

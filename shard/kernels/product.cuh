// Products of a few rows with a weight matrix, y[m, n] = sum over k of x[m, k] w[n, k]. Weights are
// the A operand of an mma (16 output features), rows of x its B operand (absent ones are zero): 1 row
// and 64 rows run the same operations in the same order, and no row's sum reads another row.
#pragma once

namespace exo {

// Sums of a block's warps, in their order, for `out` results of each row.
template <int WARPS, int TILES, int ROWS>
__device__ __forceinline__ float sum_warps(const float* part, int m, int row) {
  float v = 0.0f;
#pragma unroll
  for (int j = 0; j < WARPS; ++j) v += part[(j * TILES * 8 + m) * ROWS + row];
  return v;
}

// Grid (rows / (8 TILES), features / 16), both rounded up, 32 WARPS threads. TILES of 8 rows of x.
// Each lane reads 8 neighbouring k of two features and of a row of x: which k meets which is the
// same on both sides. Blocks of the same features are neighbours, so that weights come from memory
// once.
template <int TILES, int WARPS, class T>
__device__ __forceinline__ void dense(const T* x, const T* w, T* y, int all, int features, int k) {
  constexpr int AHEAD = 4;  // of 32 k: what a warp fetches at once
  const int skipped = blockIdx.x * TILES * 8;
  const int rows = all - skipped < TILES * 8 ? all - skipped : TILES * 8;
  x += (long long)skipped * k;
  y += (long long)skipped * features;
  __shared__ float part[WARPS * TILES * 8 * 16];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int top = blockIdx.y * 16, last = features - 1;  // past the last: computed, not kept
  const T* upper = w + (long long)(top + g < last ? top + g : last) * k + t * 8;
  const T* lower = w + (long long)(top + g + 8 < last ? top + g + 8 : last) * k + t * 8;
  float acc[TILES][4];
#pragma unroll
  for (int i = 0; i < TILES; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) acc[i][e] = 0.0f;
  const uint4 none = make_uint4(0, 0, 0, 0);
  for (int first = warp * AHEAD * 32; first < k; first += WARPS * AHEAD * 32) {
    uint4 a[AHEAD], b[AHEAD], c[AHEAD][TILES];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int at = first + i * 32;
      a[i] = at < k ? __ldg(reinterpret_cast<const uint4*>(upper + at)) : none;
      b[i] = at < k ? __ldg(reinterpret_cast<const uint4*>(lower + at)) : none;
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
#pragma unroll
      for (int j = 0; j < TILES; ++j) {
        const int at = first + i * 32, m = j * 8 + g;
        const bool live = at < k && m < rows;
        c[i][j] = live ? __ldg(reinterpret_cast<const uint4*>(x + (long long)m * k + at + t * 8))
                       : none;
      }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
#pragma unroll
      for (int j = 0; j < TILES; ++j) {
        const unsigned near[4] = {a[i].x, b[i].x, a[i].y, b[i].y};
        const unsigned far[4] = {a[i].z, b[i].z, a[i].w, b[i].w};
        mma(T(), acc[j], near, c[i][j].x, c[i][j].y);
        mma(T(), acc[j], far, c[i][j].z, c[i][j].w);
      }
  }
#pragma unroll
  for (int j = 0; j < TILES; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      part[(warp * TILES * 8 + j * 8 + 2 * t + (e & 1)) * 16 + g + (e >> 1) * 8] = acc[j][e];
  __syncthreads();
  for (int i = threadIdx.x; i < rows * 16; i += 32 * WARPS) {
    const int m = i / 16, row = i % 16;
    if (top + row < features)
      y[(long long)m * features + top + row] = as<T>(sum_warps<WARPS, TILES, 16>(part, m, row));
  }
}

// The same for float32, without tensor cores, which would round it. Grid (rows / 16, features / 4),
// rounded up, 128 threads: a warp a feature.
__device__ __forceinline__ void dense_float(const float* x, const float* w, float* y, int all,
                                            int features, int k) {
  const int lane = threadIdx.x & 31, n = blockIdx.y * 4 + (threadIdx.x >> 5);
  const int skipped = blockIdx.x * 16, rows = all - skipped < 16 ? all - skipped : 16;
  x += (long long)skipped * k;
  y += (long long)skipped * features;
  if (n >= features) return;  // the whole warp
  float acc[16];
#pragma unroll
  for (int m = 0; m < 16; ++m) acc[m] = 0.0f;
  for (int at = lane * 4; at < k; at += 128) {
    const float4 a = __ldg(reinterpret_cast<const float4*>(w + (long long)n * k + at));
#pragma unroll
    for (int m = 0; m < 16; ++m)
      if (m < rows) {
        const float4 b = __ldg(reinterpret_cast<const float4*>(x + (long long)m * k + at));
        acc[m] = __fmaf_rn(a.x, b.x, acc[m]);
        acc[m] = __fmaf_rn(a.y, b.y, acc[m]);
        acc[m] = __fmaf_rn(a.z, b.z, acc[m]);
        acc[m] = __fmaf_rn(a.w, b.w, acc[m]);
      }
  }
#pragma unroll
  for (int m = 0; m < 16; ++m)
    if (m < rows) {
      const float sum = lane_sum<32>(acc[m]);
      if (lane == 0) y[(long long)m * features + n] = sum;
    }
}

}  // namespace exo

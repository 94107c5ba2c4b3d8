// Products of up to 16 rows with a weight matrix, y[m, n] = sum over k of x[m, k] w[n, k]. Weights are
// the A operand of an mma (16 output features), rows of x its B operand (absent ones are zero): 1 row
// and 16 rows run the same operations in the same order, and no row's sum sees another row.
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

// Grid (features / 16, rounded up), 32 WARPS threads. TILES of 8 rows of x. Each lane reads 8 neighbouring k of two
// features and of a row of x: which k meets which is the same on both sides.
template <int TILES, int WARPS, class T>
__device__ __forceinline__ void dense(const T* x, const T* w, T* y, int rows, int features, int k) {
  constexpr int AHEAD = 4;  // of 32 k: what a warp fetches at once
  __shared__ float part[WARPS * TILES * 8 * 16];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int top = blockIdx.x * 16, last = features - 1;  // past the last: computed, not kept
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

// The same for float32, without tensor cores, which would round it. Grid (features / 4, rounded
// up), 128 threads: a warp a feature.
__device__ __forceinline__ void dense_float(const float* x, const float* w, float* y, int rows,
                                            int features, int k) {
  const int lane = threadIdx.x & 31, n = blockIdx.x * 4 + (threadIdx.x >> 5);
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

// 4 bits become numbers of T without arithmetic: BASE + q is the word of BASE with q in its low bits.
template <class T> struct Base;
template <> struct Base<__nv_bfloat16> {
  static constexpr unsigned WORD = 0x43004300u;
  static constexpr float VALUE = 128.0f;
  static constexpr unsigned ONES = 0x3f803f80u;
};
template <> struct Base<__half> {
  static constexpr unsigned WORD = 0x64006400u;
  static constexpr float VALUE = 1024.0f;
  static constexpr unsigned ONES = 0x3c003c00u;
};


// MLX's affine quantisation of 4 bits, w[n, k] = scale q + bias for each GROUP of 64 or 128 k; k is a
// multiple of 256. Grid (features / (16 TALL)), 32 WARPS threads, WARPS STAGES 16 TALL 176 bytes of
// dynamic shared memory or what the sums need. Each warp streams its share of k through a ring.
// Within a group nothing is rounded: y += s sum(x q) + (b - BASE s) sum(x), sum(x) by an mma with ones.
template <int TALL, int WARPS, int STAGES, int GROUP, int TILES, class T>
__device__ __forceinline__ void quantized(const T* x, const unsigned* w, const T* scales,
                                          const T* biases, T* y, unsigned char* shared, int rows,
                                          int features, int k) {
  constexpr int ROWS = 16 * TALL, PITCH = 160, SCALES = 256 / GROUP;
  constexpr int STAGE = ROWS * (PITCH + 4 * SCALES);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int steps = k / 256, top = blockIdx.x * ROWS;
  unsigned char* ring = shared + warp * (STAGES * STAGE);
  auto issue = [&](int step, int slot) {
    unsigned char* to = ring + slot * STAGE;
#pragma unroll
    for (int r = 0; r < TALL; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = r * 16 + i * 4 + (lane >> 3);
        copy16(to + row * PITCH + (lane & 7) * 16,
               reinterpret_cast<const unsigned char*>(w) + (long long)(top + row) * (k / 2) +
                   step * 128 + (lane & 7) * 16);
      }
      const int row = r * 16 + (lane & 15);
      const T* from = (lane < 16 ? scales : biases) + (long long)(top + row) * (k / GROUP) +
                      step * SCALES;
      unsigned char* into = to + ROWS * PITCH + ((lane >> 4) * ROWS + row) * (2 * SCALES);
      if (SCALES == 4) copy8(into, from);
      else copy4(into, from);
    }
  };
  int next = warp;
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    if (next < steps) issue(next, i);
    copies_end();
    next += WARPS;
  }
  float acc[TILES][TALL][4];
#pragma unroll
  for (int j = 0; j < TILES; ++j)
#pragma unroll
    for (int r = 0; r < TALL; ++r)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[j][r][i] = 0.0f;
  // Of each 64 k lane (g, t) feeds 16: 16 t to 16 t + 15 of row g of a tile.
  const uint4 none = make_uint4(0, 0, 0, 0);
  uint4 xa[TILES], xb[TILES];
  auto load_x = [&](int at) {  // in chunks of 8 numbers
#pragma unroll
    for (int j = 0; j < TILES; ++j) {
      const int m = j * 8 + g;
      const uint4* from = reinterpret_cast<const uint4*>(x + (long long)m * k) + at + 2 * t;
      xa[j] = m < rows ? __ldg(from) : none;
      xb[j] = m < rows ? __ldg(from + 1) : none;
    }
  };
  if (warp < steps) load_x(warp * 32);
  int slot = 0;
  for (int step = warp; step < steps; step += WARPS) {
    copies_wait<STAGES - 2>();
    __syncwarp();
    if (next < steps) issue(next, slot == 0 ? STAGES - 1 : slot - 1);
    copies_end();
    next += WARPS;
    const unsigned char* held = ring + slot * STAGE;
    const T* scale = reinterpret_cast<const T*>(held + ROWS * PITCH);
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      unsigned b[TILES][8];
#pragma unroll
      for (int j = 0; j < TILES; ++j) {
        b[j][0] = permute(xa[j].x, xa[j].z, 0x5410); b[j][1] = permute(xa[j].x, xa[j].z, 0x7632);
        b[j][2] = permute(xa[j].y, xa[j].w, 0x5410); b[j][3] = permute(xa[j].y, xa[j].w, 0x7632);
        b[j][4] = permute(xb[j].x, xb[j].z, 0x5410); b[j][5] = permute(xb[j].x, xb[j].z, 0x7632);
        b[j][6] = permute(xb[j].y, xb[j].w, 0x5410); b[j][7] = permute(xb[j].y, xb[j].w, 0x7632);
      }
      // The next group's x, under way while this one is computed.
      if (q < 3) load_x(step * 32 + (q + 1) * 8);
      else if (step + WARPS < steps) load_x((step + WARPS) * 32);
      float sums[TILES][4];
#pragma unroll
      for (int j = 0; j < TILES; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[j][i] = 0.0f;
        const unsigned ones[4] = {Base<T>::ONES, Base<T>::ONES, Base<T>::ONES, Base<T>::ONES};
#pragma unroll
        for (int i = 0; i < 4; ++i) mma(T(), sums[j], ones, b[j][2 * i], b[j][2 * i + 1]);
      }
#pragma unroll
      for (int r = 0; r < TALL; ++r) {
        const unsigned char* p = held + (r * 16 + g) * PITCH + q * 32 + t * 8;
        const uint2 u = *reinterpret_cast<const uint2*>(p);
        const uint2 v = *reinterpret_cast<const uint2*>(p + 8 * PITCH);
        unsigned a[4][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const unsigned uw = i < 2 ? u.x : u.y, vw = i < 2 ? v.x : v.y;
          a[i][0] = nibbles_or(uw >> (8 * (i & 1)), Base<T>::WORD);
          a[i][1] = nibbles_or(vw >> (8 * (i & 1)), Base<T>::WORD);
          a[i][2] = nibbles_or(uw >> (8 * (i & 1) + 4), Base<T>::WORD);
          a[i][3] = nibbles_or(vw >> (8 * (i & 1) + 4), Base<T>::WORD);
        }
        float s[2], c[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int at = (r * 16 + half * 8 + g) * SCALES + q * SCALES / 4;
          s[half] = num(scale[at]);
          c[half] = __fmaf_rn(-Base<T>::VALUE, s[half], num(scale[ROWS * SCALES + at]));
        }
#pragma unroll
        for (int j = 0; j < TILES; ++j) {
          float dot[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
          for (int i = 0; i < 4; ++i) mma(T(), dot, a[i], b[j][2 * i], b[j][2 * i + 1]);
#pragma unroll
          for (int e = 0; e < 4; ++e)
            acc[j][r][e] = __fmaf_rn(
                s[e >> 1], dot[e], __fmaf_rn(c[e >> 1], sums[j][e & 1], acc[j][r][e]));
        }
      }
    }
    slot = slot + 1 == STAGES ? 0 : slot + 1;
  }
  copies_wait<0>();
  __syncthreads();
  float* part = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int j = 0; j < TILES; ++j)
#pragma unroll
    for (int r = 0; r < TALL; ++r)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        part[(warp * TILES * 8 + j * 8 + 2 * t + (e & 1)) * ROWS + r * 16 + g + (e >> 1) * 8] =
            acc[j][r][e];
  __syncthreads();
  for (int i = threadIdx.x; i < rows * ROWS; i += 32 * WARPS) {
    const int m = i / ROWS, row = i % ROWS;
    y[(long long)m * features + top + row] =
        as<T>(sum_warps<WARPS, TILES, ROWS>(part, m, row));
  }
}

}  // namespace exo

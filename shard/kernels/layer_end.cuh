// A decoder layer behind its attention or recurrence in one launch: h = x + o(mixed), the norm of h,
// gate and up, y = h + down. Its blocks of 128 threads, in one row, are those of o, of the norm (one
// for each row of x), of gate and up, and of down. A block begins to load its weights, then waits until
// all blocks of the part before have ended.
#pragma once
#include "quantized.cuh"

namespace exo {

// MLX's rms_norm of a row of n numbers, added in the order of its kernel: n is a multiple of 128 chunks
// of 16 bytes, at most 8 times that. `part` has 4 numbers; `ready` returns once x is there.
template <class T, class Ready>
__device__ __forceinline__ void norm_row(const T* x, const T* weight, T* y, float eps, int n,
                                         float* part, Ready ready) {
  constexpr int N = PER_CHUNK<T>, EACH = 128 * N, MOST = 8;
  const int first = threadIdx.x * N;
  uint4 held_x[MOST], held_weight[MOST];
#pragma unroll
  for (int i = 0; i < MOST; ++i)
    if (i * EACH < n)
      held_weight[i] = *reinterpret_cast<const uint4*>(weight + i * EACH + first);
  ready();
#pragma unroll
  for (int i = 0; i < MOST; ++i)
    if (i * EACH < n) held_x[i] = *reinterpret_cast<const uint4*>(x + i * EACH + first);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < MOST; ++i)
    if (i * EACH < n)
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float v = num(reinterpret_cast<const T*>(&held_x[i])[j]);
        sum = __fmaf_rn(v, v, sum);
      }
#pragma unroll
  for (int bit = 16; bit > 0; bit >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, bit);
  if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = sum;
  __syncthreads();
  const float whole = (part[0] + part[2]) + (part[1] + part[3]);
  const float scale = rsqrtf(whole / (unsigned)n + eps);
#pragma unroll
  for (int i = 0; i < MOST; ++i)
    if (i * EACH < n) {
      T* each = reinterpret_cast<T*>(&held_x[i]);
      const T* by = reinterpret_cast<const T*>(&held_weight[i]);
#pragma unroll
      for (int j = 0; j < N; ++j) each[j] = as<T>(num(by[j]) * rounded<T>(num(each[j]) * scale));
      *reinterpret_cast<uint4*>(y + i * EACH + first) = held_x[i];
    }
}

// O, GATED and DOWN are cuts for all rows at once. `arrivals` (3) are zeros before.
template <class O, class GATED, class DOWN, class T>
__device__ __forceinline__ void layer_end(const T* mixed, const T* x, Stored<T> o, const T* norm,
                                          Stored<T> gate, Stored<T> up, Stored<T> down,
                                          unsigned* arrivals, T* y, T* h, T* normed, T* inner,
                                          unsigned char* shared, float eps, int rows, int width,
                                          int mixed_width, int inner_width) {
  __shared__ float part[4];
  const int o_blocks = (width + 15) / 16, gated_blocks = (inner_width + 15) / 16;
  int block = blockIdx.x;
  if (block < o_blocks) {
    const Stored<T> one[1] = {o};
    tiles<O, 1>(mixed, one, block * 16, width, rows, mixed_width, shared, AtOnce(),
                [&](int m, int n, const float (&sums)[1]) {
                  const long long at = (long long)m * width + n;
                  h[at] = as<T>(rounded<T>(sums[0]) + num(x[at]));
                });
    arrive(arrivals);
    return;
  }
  block -= o_blocks;
  if (block < rows) {
    const long long row = (long long)block * width;
    norm_row(h + row, norm, normed + row, eps, width, part, [&] { wait_for(arrivals, o_blocks); });
    arrive(arrivals + 1);
    return;
  }
  block -= rows;
  if (block < gated_blocks) {
    const Stored<T> both[2] = {gate, up};
    tiles<GATED, 2>(normed, both, block * 16, inner_width, rows, width, shared,
                    [&] { wait_for(arrivals + 1, rows); },
                    [&](int m, int n, const float (&sums)[2]) {
                      inner[(long long)m * inner_width + n] = gated<T>(sums);
                    });
    arrive(arrivals + 2);
    return;
  }
  block -= gated_blocks;
  const Stored<T> one[1] = {down};
  tiles<DOWN, 1>(inner, one, block * 16, width, rows, inner_width, shared,
                 [&] { wait_for(arrivals + 2, gated_blocks); },
                 [&](int m, int n, const float (&sums)[1]) {
                   const long long at = (long long)m * width + n;
                   y[at] = as<T>(rounded<T>(sums[0]) + num(h[at]));
                 });
}

}  // namespace exo

// A sum of two and its RMS norm, as a decoder layer needs both.
#pragma once

namespace exo {

// Grid (rows), 256 threads: sum = x + more, y = sum / rms(sum) * weight.
template <class T>
__device__ __forceinline__ void added_norm(const T* x, const T* more, const T* weight, T* sum, T* y,
                                           float eps, int width) {
  __shared__ float part[8];
  const long long first = (long long)blockIdx.x * width;
  float squares = 0.0f;
  for (int i = threadIdx.x; i < width; i += 256) {
    const T both = as<T>(num(x[first + i]) + num(more[first + i]));
    sum[first + i] = both;
    squares = __fmaf_rn(num(both), num(both), squares);
  }
  squares = lane_sum<32>(squares);
  if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = squares;
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) total += part[i];
  const float unit = rsqrtf(total / (float)width + eps);
  for (int i = threadIdx.x; i < width; i += 256)
    y[first + i] = as<T>(rounded<T>(num(sum[first + i]) * unit) * num(weight[i]));
}

}  // namespace exo

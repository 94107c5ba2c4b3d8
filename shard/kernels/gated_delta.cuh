// The gated delta rule: the recurrence alone for a prompt, and a whole layer between its projections
// for a few rows. D / 16 lanes hold a row of the state (16 of its D k each), every lane two rows, in
// registers for all rows of the input. Sums go over 16 products in four chains, then over lanes. The
// order never depends on how many rows there are: a verify leaves the states of single steps, bit
// for bit.
#pragma once

namespace exo {

// Element e of lane j's 16 is k = e / 4 D / 4 + 4 j + e % 4: neighbouring lanes have neighbouring
// floats, 16 bytes each, or a warp would load and store halves of sectors, at a quarter of the speed.
template <int D>
__device__ __forceinline__ void load_state(float (&st)[2][16], const float* s, int row, int j) {
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int e = 0; e < 16; e += 4) {
      const int k = e / 4 * (D / 4) + 4 * j;
      const float4 f = *reinterpret_cast<const float4*>(s + (row + r) * D + k);
      st[r][e] = f.x; st[r][e + 1] = f.y; st[r][e + 2] = f.z; st[r][e + 3] = f.w;
    }
}

template <int D>
__device__ __forceinline__ void store_state(const float (&st)[2][16], float* s, int row, int j) {
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int e = 0; e < 16; e += 4) {
      const int k = e / 4 * (D / 4) + 4 * j;
      store16(s + (row + r) * D + k, st[r][e], st[r][e + 1], st[r][e + 2], st[r][e + 3]);
    }
}

template <class T> struct alignas(4 * sizeof(T)) Four { T of[4]; };

// One row of the input: the state decays, is corrected towards v along k, and is read with q.
template <int D, class T>
__device__ __forceinline__ void step(float (&st)[2][16], const T* k, const T* q, int j, float decay,
                                     float beta, const float (&v)[2], float (&out)[2]) {
  float kf[16], qf[16];
#pragma unroll
  for (int e = 0; e < 16; ++e) {
    kf[e] = num(reinterpret_cast<const Four<T>*>(k)[e / 4 * (D / 16) + j].of[e % 4]);
    qf[e] = num(reinterpret_cast<const Four<T>*>(q)[e / 4 * (D / 16) + j].of[e % 4]);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float p[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int e = 0; e < 16; ++e) {
      st[r][e] *= decay;
      p[e & 3] = __fmaf_rn(st[r][e], kf[e], p[e & 3]);
    }
    out[r] = lane_sum<D / 16>((p[0] + p[1]) + (p[2] + p[3]));
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float delta = (v[r] - out[r]) * beta;
    float p[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int e = 0; e < 16; ++e) {
      st[r][e] = __fmaf_rn(kf[e], delta, st[r][e]);
      p[e & 3] = __fmaf_rn(st[r][e], qf[e], p[e & 3]);
    }
    out[r] = lane_sum<D / 16>((p[0] + p[1]) + (p[2] + p[3]));
  }
}

// Grid (D / ROWS, v heads, batch), 128 threads; ROWS of the state's rows a block. Chunks of 16 rows of
// the input are fetched while the chunk before is computed. Layouts as of mlx-lm's gated_delta_ops.
template <int D, class T, class G>
__device__ __forceinline__ void recurrence(const T* q, const T* k, const T* v, const G* g,
                                           const T* beta, const float* state, T* y, float* last,
                                           int rows, int k_heads, int v_heads) {
  constexpr int CHUNK = 16, ROWS = 4096 / D, N = PER_CHUNK<T>;
  __shared__ __align__(16) T sk[2][CHUNK][D], sq[2][CHUNK][D], sv[2][CHUNK][ROWS];
  __shared__ float sg[2][CHUNK], sb[2][CHUNK];
  const int tid = threadIdx.x, j = tid % (D / 16), local = tid / (D / 16) * 2;
  const int slice = blockIdx.x, h = blockIdx.y, b = blockIdx.z, row = slice * ROWS + local;
  const int hk = h / (v_heads / k_heads);
  const T* qs = q + ((long long)b * rows * k_heads + hk) * D;
  const T* ks = k + ((long long)b * rows * k_heads + hk) * D;
  const T* vs = v + ((long long)b * rows * v_heads + h) * D + slice * ROWS;
  const long long own = ((long long)b * v_heads + h) * D * D;
  float st[2][16];
  load_state<D>(st, state + own, row, j);
  auto fetch = [&](int first, int into) {
    for (int i = tid; i < CHUNK * D / N; i += 128) {
      const int t = i / (D / N), at = i % (D / N) * N;
      if (first + t < rows) {
        copy16(&sk[into][t][at], ks + (long long)(first + t) * k_heads * D + at);
        copy16(&sq[into][t][at], qs + (long long)(first + t) * k_heads * D + at);
      }
    }
    for (int i = tid; i < CHUNK * ROWS / N; i += 128) {
      const int t = i / (ROWS / N), at = i % (ROWS / N) * N;
      if (first + t < rows) copy16(&sv[into][t][at], vs + (long long)(first + t) * v_heads * D + at);
    }
    copies_end();
  };
  float decay = 0.0f, rate = 0.0f;
  auto gates = [&](int first) {
    if (tid < CHUNK && first + tid < rows) {
      const long long at = ((long long)b * rows + first + tid) * v_heads + h;
      decay = num(g[at]);
      rate = num(beta[at]);
    }
  };
  fetch(0, 0);
  gates(0);
  for (int first = 0, now = 0; first < rows; first += CHUNK, now ^= 1) {
    if (tid < CHUNK) { sg[now][tid] = decay; sb[now][tid] = rate; }
    copies_wait<0>();
    __syncthreads();
    if (first + CHUNK < rows) { fetch(first + CHUNK, now ^ 1); gates(first + CHUNK); }
    const int count = rows - first < CHUNK ? rows - first : CHUNK;
    for (int i = 0; i < count; ++i) {
      const float vv[2] = {num(sv[now][i][local]), num(sv[now][i][local + 1])};
      float out[2];
      step<D>(st, sk[now][i], sq[now][i], j, sg[now][i], sb[now][i], vv, out);
      if (j == 0) {
        T* to = y + (((long long)b * rows + first + i) * v_heads + h) * D + row;
        to[0] = as<T>(out[0]);
        to[1] = as<T>(out[1]);
      }
    }
    __syncthreads();
  }
  store_state<D>(st, last + own, row, j);
}

// Grid (v heads, batch), D D / 32 threads: all of a layer between its projections for up to 16 rows,
// or MANY in pieces of 16. In: the projections qkv, z, b, a; the convolution's rows before them and
// its kernel; states; and where each sequence begins: at (2, batch) is which of the states is its own,
// and the first of the three rows of the convolution. Out: y, the convolution's rows with the new ones
// behind, the state after every row. Of MANY rows the first ends[n] of each sequence are computed, and
// one state is stored, that after them. Numbers are rounded to T where mlx-lm's operations round.
template <int D, bool MANY, class T>
__device__ __forceinline__ void layer_rows(const T* qkv, const T* z, const T* b, const T* a,
                                           const T* before, const T* kernel, const float* a_log,
                                           const T* dt_bias, const T* norm, const float* state,
                                           const int* at, const int* ends, T* y, T* window,
                                           float* states, float eps, int batch, int rows, int k_heads,
                                           int v_heads, int before_rows) {
  constexpr int MOST = 16, THREADS = D * D / 32, WARPS = THREADS / 32, EACH = D / 32;
  __shared__ __align__(16) T s[3][MOST][D];
  __shared__ float so[MOST][D], sg[MOST], sb[MOST];
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, j = tid % (D / 16);
  const int h = blockIdx.x, n = blockIdx.y, group = v_heads / k_heads, hk = h / group;
  const int row = tid / (D / 16) * 2, keys = k_heads * D, channels = 2 * keys + v_heads * D;
  float st[2][16];
  const T* last = before + ((long long)n * before_rows + at[batch + n]) * channels;
  const int end = MANY ? ends[n] : rows;
  int from = 0;
  do {
    const int count = MANY && end - from > MOST ? MOST : end - from;
    // The small loads first: behind the state's they would wait for them.
    float gate_a = 0.0f, gate_b = 0.0f, bias = 0.0f, log_a = 0.0f, scales[EACH], gates[EACH];
    if (tid < count) {
      const long long at = ((long long)n * rows + from + tid) * v_heads + h;
      gate_b = num(b[at]); gate_a = num(a[at]); bias = num(dt_bias[h]); log_a = a_log[h];
    }
    const long long out_at = (((long long)n * rows + from + warp) * v_heads + h) * D + lane;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      scales[e] = num(norm[e * 32 + lane]);
      gates[e] = warp < count ? num(z[out_at + e * 32]) : 0.0f;
    }
    if (from == 0)
      load_state<D>(st, state + (((long long)at[n] * batch + n) * v_heads + h) * D * D, row, j);
    for (int i = tid; i < 3 * D; i += THREADS) {  // the convolution and silu, a channel a thread
      const int part = i / D, d = i % D;
      const int c = part == 0 ? hk * D + d : part == 1 ? keys + hk * D + d : 2 * keys + h * D + d;
      const bool mine = part == 2 || h % group == 0;  // heads of v share those of q and k
      float w[4], in[3];
#pragma unroll
      for (int e = 0; e < 4; ++e) w[e] = num(kernel[c * 4 + e]);
#pragma unroll
      for (int e = 0; e < 3; ++e) {
        const T x = from == 0 ? last[(long long)e * channels + c]
                              : qkv[((long long)n * rows + from - 3 + e) * channels + c];
        if (mine && from == 0) window[((long long)n * (3 + rows) + e) * channels + c] = x;
        in[e] = num(x);
      }
      T next = qkv[((long long)n * rows + from) * channels + c];
      for (int t = 0; t < count; ++t) {
        const T x = next;
        if (t + 1 < count) next = qkv[((long long)n * rows + from + t + 1) * channels + c];
        if (mine) window[((long long)n * (3 + rows) + 3 + from + t) * channels + c] = x;
        const float f = num(x);
        const float sum = rounded<T>(
            __fmaf_rn(w[3], f, __fmaf_rn(w[2], in[2], __fmaf_rn(w[1], in[1], w[0] * in[0]))));
        in[0] = in[1]; in[1] = in[2]; in[2] = f;
        s[part][t][d] = as<T>(sum * rounded<T>(sigmoid(sum)));
      }
    }
    if (tid < count) {
      sb[tid] = rounded<T>(sigmoid(gate_b));
      const float x = rounded<T>(gate_a + bias);
      const float softplus = rounded<T>(fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))));
      sg[tid] = expf(-expf(log_a) * softplus);
    }
    __syncthreads();
    for (int i = warp; i < 2 * count; i += WARPS) {  // q and k to unit length, q by 1 / D of it
      T* x = s[i & 1][i >> 1];
      float f[EACH], sum = 0.0f;
#pragma unroll
      for (int e = 0; e < EACH; ++e) {
        f[e] = num(x[e * 32 + lane]);
        sum = __fmaf_rn(f[e], f[e], sum);
      }
      const float unit = rsqrtf(lane_sum<32>(sum) / D + 1e-6f / D);
      const float scale = rounded<T>((i & 1) ? 1.0f / sqrtf((float)D) : 1.0f / D);
#pragma unroll
      for (int e = 0; e < EACH; ++e) x[e * 32 + lane] = as<T>(rounded<T>(f[e] * unit) * scale);
    }
    __syncthreads();
    for (int t = 0; t < count; ++t) {
      const float vv[2] = {num(s[2][t][row]), num(s[2][t][row + 1])};
      float out[2];
      step<D>(st, s[1][t], s[0][t], j, sg[t], sb[t], vv, out);
      if (j == 0) { so[t][row] = rounded<T>(out[0]); so[t][row + 1] = rounded<T>(out[1]); }
      if (!MANY)
        store_state<D>(st, states + (((long long)t * batch + n) * v_heads + h) * D * D, row, j);
    }
    __syncthreads();
    for (int t = warp; t < count; t += WARPS) {  // the gated norm
      float f[EACH], sum = 0.0f;
#pragma unroll
      for (int e = 0; e < EACH; ++e) {
        f[e] = so[t][e * 32 + lane];
        sum = __fmaf_rn(f[e], f[e], sum);
      }
      const float unit = rsqrtf(lane_sum<32>(sum) / D + eps);
#pragma unroll
      for (int e = 0; e < EACH; ++e) {
        const int d = e * 32 + lane;
        const long long at = (((long long)n * rows + from + t) * v_heads + h) * D + d;
        const float gate = t == warp ? gates[e] : num(z[at]), x = rounded<T>(f[e] * unit * scales[e]);
        y[at] = as<T>(gate * sigmoid(gate) * x);
      }
    }
    from += MOST;
  } while (MANY && from < end);
  if (MANY) store_state<D>(st, states + ((long long)n * v_heads + h) * D * D, row, j);
}

}  // namespace exo

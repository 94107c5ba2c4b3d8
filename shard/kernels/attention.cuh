// Attention of a few new rows over a cache. Keys are cut into chunks of 64 by their position. The
// result of a chunk for a row depends on the row and the keys that it may read, never on other rows,
// and chunks are joined in order. A key that a row may not read adds exactly nothing, as an absent
// one does: a verify's rows are those of single steps, bit for bit, at any context.
#pragma once

namespace exo {

constexpr int KEYS = 64;  // a chunk

// Grid (heads + 2 key heads, rows, batch), D threads: norms and rotary positions. `wide` holds each
// head's q and its gate; `fixed` the norms' eps, log2 of the rotary base and its scale; `first` the
// position of each sequence's first row. The first TURNED of D numbers turn, in halves.
template <int D, int TURNED, class T>
__device__ __forceinline__ void prepare(const T* wide, const T* k, const T* v, const T* q_norm,
                                        const T* k_norm, const float* fixed, const int* first,
                                        T* q_out, T* k_out, T* v_out, int rows, int heads,
                                        int key_heads) {
  constexpr int WARPS = D / 32, HALF = TURNED / 2;
  __shared__ float part[WARPS], row[D];
  const int d = threadIdx.x, m = blockIdx.y, n = blockIdx.z, all = blockIdx.x;
  const bool is_q = all < heads, is_v = all >= heads + key_heads;
  const int head = is_q ? all : is_v ? all - heads - key_heads : all - heads;
  const long long at = (long long)n * rows + m;
  const T raw = is_q ? wide[(at * heads + head) * 2 * D + d]
                     : (is_v ? v : k)[(at * key_heads + head) * D + d];
  const long long to = (((long long)n * (is_q ? heads : key_heads) + head) * rows + m) * D + d;
  if (is_v) {  // the whole block
    v_out[to] = raw;
    return;
  }
  const float f = num(raw), sum = lane_sum<32>(f * f);
  if ((d & 31) == 0) part[d >> 5] = sum;
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < WARPS; ++i) total += part[i];
  const float unit = rounded<T>(f * rsqrtf(total / D + fixed[0]));
  float x = rounded<T>(unit * num((is_q ? q_norm : k_norm)[d]));
  row[d] = x;
  __syncthreads();
  if (d < TURNED) {
    const int i = d < HALF ? d : d - HALF;
    const float speed = exp2f(-((float)i / (float)HALF) * fixed[1]);
    const float angle = fixed[2] * (float)(first[n] + m) * speed;
    const float c = cosf(angle), s = sinf(angle), low = row[i], high = row[i + HALF];
    x = d < HALF ? low * c - high * s : low * s + high * c;
  }
  (is_q ? q_out : k_out)[to] = as<T>(x);
}

// Grid (chunks, key heads, batch), D / 2 threads: a chunk's result for each row of the heads that
// share its keys. `parts`: sums of values (batch, heads, rows, chunks, D); `tops`: the largest score and the
// sum of weights. `keys` and `values` are whole buffers (batch, key heads, room, D).
template <int D, class T>
__device__ __forceinline__ void attend(const T* q, const T* keys, const T* values, const int* first,
                                       float* parts, float* tops, float scale, int rows, int heads,
                                       int key_heads, int room) {
  constexpr int WARPS = D / 64, TILES = 8 / WARPS;  // of 8 keys, a warp
  __shared__ __align__(16) float scores[16][KEYS + 4];
  __shared__ __align__(16) T weights[16][KEYS + 8];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int chunk = blockIdx.x, chunks = gridDim.x, head = blockIdx.y, n = blockIdx.z;
  const int share = heads / key_heads, all = share * rows, past = first[n], held = past + rows;
  const long long own = ((long long)n * key_heads + head) * room * D;
  const long long mine = ((long long)n * heads + head * share) * rows;  // first of our rows of q
  const T* ks = keys + own;
  const T* vs = values + own + warp * 64 + g * 8;
  const uint4 none = make_uint4(0, 0, 0, 0);
  for (int top = 0; top < all; top += 16) {
    const int up = top + g, low = top + g + 8;
    float c[TILES][4];
#pragma unroll
    for (int j = 0; j < TILES; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) c[j][e] = 0.0f;
#pragma unroll
    for (int i = 0; i < D / 64; ++i) {  // of each 64 numbers a lane has 16 of every row
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = i * 64 + t * 16 + half * 8;
        const uint4 a = up < all ? __ldg(reinterpret_cast<const uint4*>(q + (mine + up) * D + at))
                                 : none;
        const uint4 b = low < all ? __ldg(reinterpret_cast<const uint4*>(q + (mine + low) * D + at))
                                  : none;
        const unsigned near[4] = {a.x, b.x, a.y, b.y}, far[4] = {a.z, b.z, a.w, b.w};
#pragma unroll
        for (int j = 0; j < TILES; ++j) {
          const int key = chunk * KEYS + (warp * TILES + j) * 8 + g;
          const uint4 k =
              key < held ? __ldg(reinterpret_cast<const uint4*>(ks + (long long)key * D + at))
                         : none;
          mma(T(), c[j], near, k.x, k.y);
          mma(T(), c[j], far, k.z, k.w);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < TILES; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = g + (e >> 1) * 8, key = (warp * TILES + j) * 8 + 2 * t + (e & 1);
        const bool seen = chunk * KEYS + key <= past + (top + row) % rows;
        scores[row][key] = seen ? c[j][e] * scale : -1e30f;
      }
    __syncthreads();
    for (int row = warp; row < 16; row += WARPS) {
      const float one = scores[row][lane], two = scores[row][lane + 32];
      float most = fmaxf(one, two);
#pragma unroll
      for (int bit = 1; bit < 32; bit <<= 1)
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, bit));
      const T a = as<T>(one > -1e29f ? expf(one - most) : 0.0f);
      const T b = as<T>(two > -1e29f ? expf(two - most) : 0.0f);
      weights[row][lane] = a;
      weights[row][lane + 32] = b;
      const float sum = lane_sum<32>(num(a) + num(b));
      if (lane == 0 && top + row < all) {
        float* to = tops + ((mine + top + row) * chunks + chunk) * 2;
        to[0] = most;
        to[1] = sum;
      }
    }
    __syncthreads();
    float out[8][4];
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) out[j][e] = 0.0f;
#pragma unroll
    for (int block = 0; block < KEYS / 16; ++block) {  // lane t has keys 4 t to 4 t + 3 of 16
      const int first_key = block * 16 + t * 4;
      const uint2 a = *reinterpret_cast<const uint2*>(&weights[g][first_key]);
      const uint2 b = *reinterpret_cast<const uint2*>(&weights[g + 8][first_key]);
      const unsigned w[4] = {a.x, b.x, a.y, b.y};
      unsigned v[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = chunk * KEYS + first_key + i;
        const uint4 raw =
            key < held ? __ldg(reinterpret_cast<const uint4*>(vs + (long long)key * D)) : none;
        v[i][0] = raw.x; v[i][1] = raw.y; v[i][2] = raw.z; v[i][3] = raw.w;
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {  // number 8 g + j of the warp's 64
        const unsigned which = j & 1 ? 0x7632 : 0x5410;
        mma(T(), out[j], w, permute(v[0][j / 2], v[1][j / 2], which),
            permute(v[2][j / 2], v[3][j / 2], which));
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = top + g + half * 8;
      if (row >= all) continue;
      float* to = parts + ((mine + row) * chunks + chunk) * D + warp * 64;
#pragma unroll
      for (int e = 0; e < 2; ++e)
#pragma unroll
        for (int j = 0; j < 8; j += 4)
          store16(to + (2 * t + e) * 8 + j, out[j][half * 2 + e], out[j + 1][half * 2 + e],
                  out[j + 2][half * 2 + e], out[j + 3][half * 2 + e]);
    }
    __syncthreads();
  }
}

// Grid (heads, rows, batch), D threads: the chunks in their order, times the gate.
template <int D, class T>
__device__ __forceinline__ void join(const float* parts, const float* tops, const T* wide, T* y,
                                     int rows, int heads, int chunks) {
  const int d = threadIdx.x, head = blockIdx.x, m = blockIdx.y, n = blockIdx.z;
  const long long row = ((long long)n * heads + head) * rows + m;
  const float* of = tops + row * chunks * 2;
  float most = -1e30f;
  for (int i = 0; i < chunks; ++i) most = fmaxf(most, of[2 * i]);
  float sum = 0.0f, out = 0.0f;
#pragma unroll 4
  for (int i = 0; i < chunks; ++i) {
    const float weight = expf(of[2 * i] - most);
    sum = __fmaf_rn(weight, of[2 * i + 1], sum);
    out = __fmaf_rn(weight, parts[(row * chunks + i) * D + d], out);
  }
  const long long at = ((long long)n * rows + m) * heads + head;
  const float gate = rounded<T>(sigmoid(num(wide[at * 2 * D + D + d])));
  y[at * D + d] = as<T>(rounded<T>(out / sum) * gate);
}

}  // namespace exo

// Products of a few rows with quantised weights, w[n, k] = scale q + bias for each GROUP of 32, 64 or
// 128 k, q of 4 or 8 bits as MLX's affine mode stores them. As in product.cuh weights are the A
// operand of an mma: a row's bits do not depend on how many rows there are. They depend on WARPS
// alone, so TILES, WIDE and RING may follow the number of rows.
//
// 4 bits become numbers of T without arithmetic: BASE + q is the word of BASE with q in its low bits.
// 8 bits are two such numbers, their halves. Within a group nothing is rounded:
// y += s sum(x q) + (b - BASE s) sum(x), sum(x) by an mma with ones.
#pragma once

namespace exo {

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

// A weight matrix as MLX stores it.
template <class T> struct Stored {
  const unsigned* w;
  const T* scales;
  const T* biases;
};

// How a warp walks through k: STEP k at a time (128 bytes of a row of weights), in units within one
// group; of each unit a lane has LK neighbouring k of two features and of a row of x.
template <int BITS, int GROUP> struct Walk {
  static constexpr int STEP = 1024 / BITS, UNIT = BITS == 8 || GROUP == 32 ? 32 : 64;
  static constexpr int LK = UNIT / 4, UNITS = STEP / UNIT, CHUNKS = LK / 8;
  static constexpr int WORDS = LK * BITS / 32;  // of weights, a lane a unit
  static constexpr int SCALES = STEP / GROUP;   // a row a step
  static constexpr int PACK = SCALES > 1 ? SCALES : 2;
  static constexpr int PITCH = WORDS == 1 ? 144 : 160;  // every bank once in a read of fragments
  static constexpr int ROW = PITCH + 4 * PACK;          // bytes of a row in a stage, scales and all
  static constexpr int X_CHUNKS = STEP / 8;             // of 16 bytes, a row of x
  static constexpr int X_PITCH = STEP * 2 + (CHUNKS == 1 ? 64 : 16);  // every bank once here too
};

template <int N, class T> struct alignas(2 * N) Pack { T of[N]; };

// How a product is cut: a block computes 16 WIDE features of each matrix for 8 TILES rows of x. WARPS
// warps share k; each streams its part of the weights through a ring of STAGES in shared memory. With
// RING its part of x comes with them: a load by itself would wait behind all weights that are under
// way. Many rows of x make the ring too large.
template <int BITS_, int GROUP_, int TILES_, int WIDE_, int WARPS_, int STAGES_, bool RING_>
struct Cut {
  static constexpr int BITS = BITS_, GROUP = GROUP_, TILES = TILES_, WIDE = WIDE_, WARPS = WARPS_;
  static constexpr int STAGES = STAGES_;
  static constexpr bool RING = RING_;
};

// One block's part: 16 WIDE features of each of MATS matrices from feature `top` on, for up to 8 TILES
// rows of x. `keep(m, feature, sums)` gets the MATS sums.
template <class C, int MATS, class T, class Keep>
__device__ __forceinline__ void tiles(const T* x, const Stored<T> (&from)[MATS], int top,
                                      int features, int rows, int k, unsigned char* shared,
                                      Keep keep) {
  constexpr int BITS = C::BITS, GROUP = C::GROUP, TILES = C::TILES, WIDE = C::WIDE;
  constexpr int WARPS = C::WARPS, STAGES = C::STAGES;
  constexpr bool RING = C::RING;
  using W = Walk<BITS, GROUP>;
  using P = Pack<W::PACK, T>;
  constexpr int TALL = MATS * WIDE, ROWS = 16 * TALL, WEIGHTS = ROWS * W::ROW;
  const int stage = RING ? WEIGHTS + rows * W::X_PITCH : WEIGHTS;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int steps = k / W::STEP, groups = k / GROUP, last = features - 1;
  unsigned char* ring = shared + warp * (STAGES * stage);
  // The feature of row `row` of tile r, of matrix r / WIDE.
  auto feature = [&](int r, int row) {
    const int at = top + r % WIDE * 16 + row;
    return at < last ? at : last;
  };
  auto issue = [&](int step, int slot) {
    unsigned char* to = ring + slot * stage;
#pragma unroll
    for (int r = 0; r < TALL; ++r) {
      const Stored<T>& matrix = from[r / WIDE];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = i * 4 + (lane >> 3);
        copy16(to + (r * 16 + row) * W::PITCH + (lane & 7) * 16,
               reinterpret_cast<const unsigned char*>(matrix.w) +
                   (long long)feature(r, row) * (k / 8 * BITS) + step * 128 + (lane & 7) * 16);
      }
      const int row = lane & 15;
      const long long at = (long long)feature(r, row) * groups + step * W::SCALES;
      const T* source = (lane < 16 ? matrix.scales : matrix.biases) +
                        (W::SCALES > 1 ? at : at & ~1ll);
      unsigned char* into = to + ROWS * W::PITCH + ((lane >> 4) * ROWS + r * 16 + row) * sizeof(P);
      if (sizeof(P) == 16) copy16(into, source);
      else if (sizeof(P) == 8) copy8(into, source);
      else copy4(into, source);
    }
    if (RING)
      for (int i = lane; i < rows * W::X_CHUNKS; i += 32) {
        const int m = i / W::X_CHUNKS, at = i % W::X_CHUNKS;
        copy16_cached(to + WEIGHTS + m * W::X_PITCH + at * 16,
                      x + (long long)m * k + step * W::STEP + at * 8);
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
  const uint4 none = make_uint4(0, 0, 0, 0);
  uint4 held_x[TILES][W::CHUNKS];
  auto load_x = [&](int step, int unit) {
#pragma unroll
    for (int j = 0; j < TILES; ++j) {
      const int m = j * 8 + g;
      const T* at = x + (long long)m * k + step * W::STEP + unit * W::UNIT + t * W::LK;
#pragma unroll
      for (int c = 0; c < W::CHUNKS; ++c)
        held_x[j][c] = m < rows ? __ldg(reinterpret_cast<const uint4*>(at) + c) : none;
    }
  };
  if (!RING && warp < steps) load_x(warp, 0);
  int slot = 0;
  for (int step = warp; step < steps; step += WARPS) {
    copies_wait<STAGES - 2>();
    __syncwarp();
    if (next < steps) issue(next, slot == 0 ? STAGES - 1 : slot - 1);
    copies_end();
    next += WARPS;
    const unsigned char* held = ring + slot * stage;
    P scales[TALL][2], biases[TALL][2];
#pragma unroll
    for (int r = 0; r < TALL; ++r)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const P* of = reinterpret_cast<const P*>(held + ROWS * W::PITCH) + r * 16 + half * 8 + g;
        scales[r][half] = of[0];
        biases[r][half] = of[ROWS];
        if (W::SCALES == 1) {  // one of the two that were copied
          const bool odd = ((long long)feature(r, half * 8 + g) * groups + step) & 1;
          if (odd) scales[r][half].of[0] = scales[r][half].of[W::PACK - 1];
          if (odd) biases[r][half].of[0] = biases[r][half].of[W::PACK - 1];
        }
      }
#pragma unroll
    for (int u = 0; u < W::UNITS; ++u) {
      unsigned b[TILES][W::CHUNKS * 4];
#pragma unroll
      for (int j = 0; j < TILES; ++j) {
        // An absent row repeats the first one: its sums are not kept.
        const int m = j * 8 + g < rows ? j * 8 + g : 0;
        const unsigned char* ring_x =
            held + WEIGHTS + m * W::X_PITCH + (u * W::UNIT + t * W::LK) * sizeof(T);
#pragma unroll
        for (int c = 0; c < W::CHUNKS; ++c) {  // k that are neighbours in a word of weights
          const uint4 v = RING ? *(reinterpret_cast<const uint4*>(ring_x) + c) : held_x[j][c];
          const unsigned second = BITS == 4 ? v.z : v.y, third = BITS == 4 ? v.y : v.z;
          b[j][c * 4] = permute(v.x, second, 0x5410);
          b[j][c * 4 + 1] = permute(v.x, second, 0x7632);
          b[j][c * 4 + 2] = permute(third, v.w, 0x5410);
          b[j][c * 4 + 3] = permute(third, v.w, 0x7632);
        }
      }
      if (!RING) {  // the next unit's x, under way while this one is computed
        if (u + 1 < W::UNITS) load_x(step, u + 1);
        else if (step + WARPS < steps) load_x(step + WARPS, 0);
      }
      float sums[TILES][4];
#pragma unroll
      for (int j = 0; j < TILES; ++j) {
        const unsigned ones[4] = {Base<T>::ONES, Base<T>::ONES, Base<T>::ONES, Base<T>::ONES};
        mma_first(T(), sums[j], ones, b[j][0], b[j][1]);
#pragma unroll
        for (int i = 1; i < W::CHUNKS * 2; ++i)
          mma(T(), sums[j], ones, b[j][2 * i], b[j][2 * i + 1]);
      }
#pragma unroll
      for (int r = 0; r < TALL; ++r) {
        const unsigned char* p = held + (r * 16 + g) * W::PITCH + u * (W::UNIT * BITS / 8) +
                                 t * (W::WORDS * 4);
        unsigned upper[W::WORDS], lower[W::WORDS];
        if (W::WORDS == 2) {
          const uint2 one = *reinterpret_cast<const uint2*>(p);
          const uint2 two = *reinterpret_cast<const uint2*>(p + 8 * W::PITCH);
          upper[0] = one.x; upper[W::WORDS - 1] = one.y;
          lower[0] = two.x; lower[W::WORDS - 1] = two.y;
        } else {
          upper[0] = *reinterpret_cast<const unsigned*>(p);
          lower[0] = *reinterpret_cast<const unsigned*>(p + 8 * W::PITCH);
        }
        // Fragment i of a chunk: bits `low` and `low + apart` on of word `from`.
        auto fragment = [&](int i, int high, unsigned (&a)[4]) {
          const int word = BITS == 4 ? i / 2 : i, first = BITS == 4 ? 8 * (i & 1) : 4 * high;
          const int apart = BITS == 4 ? 4 : 8;
          a[0] = nibbles_or(upper[word] >> first, Base<T>::WORD);
          a[1] = nibbles_or(lower[word] >> first, Base<T>::WORD);
          a[2] = nibbles_or(upper[word] >> (first + apart), Base<T>::WORD);
          a[3] = nibbles_or(lower[word] >> (first + apart), Base<T>::WORD);
        };
        unsigned a[W::CHUNKS * 2][4], a_high[W::CHUNKS * 2][4];
#pragma unroll
        for (int i = 0; i < W::CHUNKS * 2; ++i) {
          fragment(i, 0, a[i]);
          if (BITS == 8) fragment(i, 1, a_high[i]);
        }
        float s[2], c[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          constexpr float BASE = Base<T>::VALUE * (BITS == 8 ? 17.0f : 1.0f);
          s[half] = num(scales[r][half].of[u * W::UNIT / GROUP]);
          c[half] = __fmaf_rn(-BASE, s[half], num(biases[r][half].of[u * W::UNIT / GROUP]));
        }
#pragma unroll
        for (int j = 0; j < TILES; ++j) {
          float dot[4], high[4];
          mma_first(T(), dot, a[0], b[j][0], b[j][1]);
          if (BITS == 8) mma_first(T(), high, a_high[0], b[j][0], b[j][1]);
#pragma unroll
          for (int i = 1; i < W::CHUNKS * 2; ++i) {
            mma(T(), dot, a[i], b[j][2 * i], b[j][2 * i + 1]);
            if (BITS == 8) mma(T(), high, a_high[i], b[j][2 * i], b[j][2 * i + 1]);
          }
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            if (BITS == 8) dot[e] = __fmaf_rn(16.0f, high[e], dot[e]);
            acc[j][r][e] = __fmaf_rn(
                s[e >> 1], dot[e], __fmaf_rn(c[e >> 1], sums[j][e & 1], acc[j][r][e]));
          }
        }
      }
    }
    slot = slot + 1 == STAGES ? 0 : slot + 1;
  }
  copies_wait<0>();
  __syncthreads();
  float* part = reinterpret_cast<float*>(shared);  // (WARPS, 8 TILES, ROWS)
#pragma unroll
  for (int j = 0; j < TILES; ++j)
#pragma unroll
    for (int r = 0; r < TALL; ++r)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        part[(warp * TILES * 8 + j * 8 + 2 * t + (e & 1)) * ROWS + r * 16 + g + (e >> 1) * 8] =
            acc[j][r][e];
  __syncthreads();
  for (int i = threadIdx.x; i < rows * 16 * WIDE; i += 32 * WARPS) {
    const int m = i / (16 * WIDE), row = i % (16 * WIDE);
    if (top + row >= features) continue;
    float sums[MATS];
#pragma unroll
    for (int r = 0; r < MATS; ++r) {
      sums[r] = 0.0f;
#pragma unroll
      for (int j = 0; j < WARPS; ++j)
        sums[r] += part[(j * TILES * 8 + m) * ROWS + r * 16 * WIDE + row];
    }
    keep(m, top + row, sums);
  }
}

// silu(gate) * up, rounded where MLX's operations round.
template <class T> __device__ __forceinline__ T gated(const float (&sums)[2]) {
  const float gate = rounded<T>(sums[0]);
  return as<T>(rounded<T>(gate * rounded<T>(sigmoid(gate))) * rounded<T>(sums[1]));
}

// Grid (rows / (8 TILES), features / (16 WIDE)), rounded up, 32 WARPS threads. With ADDED
// y = x w + added.
template <class C, bool ADDED, class T>
__device__ __forceinline__ void quantized(const T* x, Stored<T> from, const T* added, T* y,
                                          unsigned char* shared, int all, int features, int k) {
  const int skipped = blockIdx.x * C::TILES * 8, left = all - skipped;
  const Stored<T> each[1] = {from};
  tiles<C>(x + (long long)skipped * k, each, blockIdx.y * 16 * C::WIDE, features,
           left < C::TILES * 8 ? left : C::TILES * 8, k, shared,
           [&](int m, int n, const float (&sums)[1]) {
             const long long at = (long long)(skipped + m) * features + n;
             y[at] = ADDED ? as<T>(rounded<T>(sums[0]) + num(added[at])) : as<T>(sums[0]);
           });
}

// As `quantized` for two matrices of one shape: silu(x gate) * (x up).
template <class C, class T>
__device__ __forceinline__ void quantized_gated(const T* x, Stored<T> gate, Stored<T> up, T* y,
                                                unsigned char* shared, int all, int features,
                                                int k) {
  const int skipped = blockIdx.x * C::TILES * 8, left = all - skipped;
  const Stored<T> both[2] = {gate, up};
  tiles<C>(x + (long long)skipped * k, both, blockIdx.y * 16 * C::WIDE, features,
           left < C::TILES * 8 ? left : C::TILES * 8, k, shared,
           [&](int m, int n, const float (&sums)[2]) {
             y[(long long)(skipped + m) * features + n] = gated<T>(sums);
           });
}

// Matrix e of a stack of them.
template <class C, class T>
__device__ __forceinline__ Stored<T> one_of(Stored<T> stack, unsigned e, int features, int k) {
  const long long before = (long long)e * features;
  return {stack.w + before * (k / 32 * C::BITS), stack.scales + before * (k / C::GROUP),
          stack.biases + before * (k / C::GROUP)};
}

// Pair p is row p / each of x times the matrix that expert[p] names. Grid (pairs, features / 16,
// rounded up), 32 WARPS threads.
template <class C, class T>
__device__ __forceinline__ void experts(const T* x, Stored<T> stack, const unsigned* expert, T* y,
                                        unsigned char* shared, int each, int features, int k) {
  const int pair = blockIdx.x;
  const Stored<T> one[1] = {one_of<C>(stack, expert[pair], features, k)};
  tiles<C>(x + (long long)(pair / each) * k, one, blockIdx.y * 16, features, 1, k, shared,
           [&](int, int n, const float (&sums)[1]) {
             y[(long long)pair * features + n] = as<T>(sums[0]);
           });
}

// As `experts`, silu(x gate) * (x up).
template <class C, class T>
__device__ __forceinline__ void experts_gated(const T* x, Stored<T> gate, Stored<T> up,
                                              const unsigned* expert, T* y, unsigned char* shared,
                                              int each, int features, int k) {
  const int pair = blockIdx.x;
  const Stored<T> both[2] = {one_of<C>(gate, expert[pair], features, k),
                             one_of<C>(up, expert[pair], features, k)};
  tiles<C>(x + (long long)(pair / each) * k, both, blockIdx.y * 16, features, 1, k, shared,
           [&](int, int n, const float (&sums)[2]) {
             y[(long long)pair * features + n] = gated<T>(sums);
           });
}

// Several matrices over one x: block row b computes 16 WIDE features of the matrix that holds them.
template <class C, int COUNT, class T>
__device__ __forceinline__ void several(const T* x, const Stored<T> (&from)[COUNT],
                                        T* const (&y)[COUNT], const int (&features)[COUNT],
                                        unsigned char* shared, int all, int k) {
  constexpr int EACH = 16 * C::WIDE;
  int block = blockIdx.y;
  Stored<T> one[1] = {from[0]};
  T* to = y[0];
  int wide = features[0];
#pragma unroll
  for (int i = 0; i + 1 < COUNT; ++i) {
    const int here = (features[i] + EACH - 1) / EACH;
    if (to == y[i] && block >= here) {
      block -= here;
      one[0] = from[i + 1];
      to = y[i + 1];
      wide = features[i + 1];
    }
  }
  const int skipped = blockIdx.x * C::TILES * 8, left = all - skipped;
  tiles<C>(x + (long long)skipped * k, one, block * EACH, wide,
           left < C::TILES * 8 ? left : C::TILES * 8, k, shared,
           [&](int m, int n, const float (&sums)[1]) {
             to[(long long)(skipped + m) * wide + n] = as<T>(sums[0]);
           });
}

}  // namespace exo

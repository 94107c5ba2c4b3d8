// Products of float32 matrices on a CPU, in place of the reference BLAS that MLX brings on Linux.
//
// Every element of C is summed in one order, whatever the numbers of rows and columns: a request
// computes alone what it computes among others, and a verify what single steps do.
#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef __m256 lanes;
typedef float unaligned_lanes __attribute__((vector_size(32), aligned(4)));
typedef float unaligned_four __attribute__((vector_size(16), aligned(4)));
enum { LANES = 8, LINE = 16, AHEAD = 2, ROW_MAJOR = 101, TRANSPOSED = 112 };

typedef void (*product)(int, int, int, int, int, int, float, const float *, int, const float *, int,
                        float, float *, int);

static product other;
static long computed;

static inline lanes load(const float *from) { return *(const unaligned_lanes *)from; }

static inline float total(lanes v) {
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

// Lanes 0 to 3 of `v` and 4 to 7, added.
static inline __m128 halves(lanes v) {
  return _mm256_castps256_ps128(v) + _mm256_extractf128_ps(v, 1);
}

// The `total` of each of four sums, added in the same order.
static inline __m128 totals(const lanes *v) {
  __m128 x = halves(v[0]), y = halves(v[1]), z = halves(v[2]), w = halves(v[3]);
  __m128 xy = _mm_unpacklo_ps(x, y) + _mm_unpackhi_ps(x, y);
  __m128 zw = _mm_unpacklo_ps(z, w) + _mm_unpackhi_ps(z, w);
  return _mm_movelh_ps(xy, zw) + _mm_movehl_ps(zw, xy);
}

static inline void put(float *c, float sum, float alpha, float beta) {
  *c = beta == 0.0f ? alpha * sum : alpha * sum + beta * *c;
}

// R rows of A with S rows of B, a multiple of 4: sums along both, eight lanes each. A matrix of
// weights is in no cache, and the CPU does not foresee that its rows are read S at a time: asking
// for those of the tile after the next takes half of the time of several rows.
#define TILE(NAME, R, S)                                                                          \
  static inline void NAME(int depth, float alpha, const float *a, int64_t lda, const float *b,    \
                          int64_t ldb, float beta, float *c, int64_t ldc) {                       \
    lanes sums[R][S] = {0};                                                                       \
    int k = 0;                                                                                    \
    for (; k + LANES <= depth; k += LANES) {                                                      \
      lanes right[S];                                                                             \
      _Pragma("GCC unroll 8") for (int s = 0; s < S; s++) {                                       \
        if (k % LINE == 0) __builtin_prefetch(b + (AHEAD * S + s) * ldb + k);                     \
        right[s] = load(b + s * ldb + k);                                                         \
      }                                                                                           \
      _Pragma("GCC unroll 8") for (int r = 0; r < R; r++) {                                       \
        lanes left = load(a + r * lda + k);                                                       \
        _Pragma("GCC unroll 8") for (int s = 0; s < S; s++) sums[r][s] += left * right[s];        \
      }                                                                                           \
    }                                                                                             \
    _Pragma("GCC unroll 8") for (int r = 0; r < R; r++)                                           \
      _Pragma("GCC unroll 8") for (int s = 0; s < S; s += 4) {                                    \
        __m128 sum = totals(&sums[r][s]);                                                         \
        for (int t = k; t < depth; t++)                                                           \
          for (int i = 0; i < 4; i++)                                                             \
            sum[i] = __builtin_fmaf(a[r * lda + t], b[(s + i) * ldb + t], sum[i]);                \
        unaligned_four *to = (unaligned_four *)(c + r * ldc + s);                                 \
        *to = beta == 0.0f ? alpha * sum : alpha * sum + beta * *to;                              \
      }                                                                                           \
  }
TILE(tile_3x4, 3, 4)
TILE(tile_2x4, 2, 4)
TILE(tile_1x4, 1, 4)
TILE(tile_1x8, 1, 8)

// One row with one row.
static inline float sum_of(int depth, const float *a, const float *b) {
  lanes sums = {0};
  int k = 0;
  for (; k + LANES <= depth; k += LANES) sums += load(a + k) * load(b + k);
  float sum = total(sums);
  for (; k < depth; k++) sum = __builtin_fmaf(a[k], b[k], sum);
  return sum;
}

// C = A B^T, both with their rows along the sum: a linear layer.
static void rows_by_rows(int m, int n, int depth, float alpha, const float *a, int64_t lda,
                         const float *b, int64_t ldb, float beta, float *c, int64_t ldc) {
  enum { BLOCK = 48 };
  for (int first = 0; first < m; first += BLOCK) {
    int rows = m - first < BLOCK ? m - first : BLOCK;
    const float *left = a + first * lda;
    float *out = c + first * ldc;
    int j = 0;
    if (rows == 1)
      for (; j + 8 <= n; j += 8)
        tile_1x8(depth, alpha, left, lda, b + j * ldb, ldb, beta, out + j, ldc);
    for (; j + 4 <= n; j += 4) {
      const float *right = b + j * ldb;
      int i = 0;
      for (; i + 3 <= rows; i += 3)
        tile_3x4(depth, alpha, left + i * lda, lda, right, ldb, beta, out + i * ldc + j, ldc);
      if (rows - i == 2)
        tile_2x4(depth, alpha, left + i * lda, lda, right, ldb, beta, out + i * ldc + j, ldc);
      if (rows - i == 1)
        tile_1x4(depth, alpha, left + i * lda, lda, right, ldb, beta, out + i * ldc + j, ldc);
    }
    for (; j < n; j++)
      for (int i = 0; i < rows; i++)
        put(out + i * ldc + j, sum_of(depth, left + i * lda, b + j * ldb), alpha, beta);
  }
}

// C = A B, the columns of B side by side in the lanes; each sum goes along the depth.
#define STRIP(NAME, R, V)                                                                         \
  static inline void NAME(int depth, float alpha, const float *a, int64_t lda, const float *b,    \
                          int64_t ldb, float beta, float *c, int64_t ldc) {                       \
    lanes sums[R][V] = {0};                                                                       \
    for (int k = 0; k < depth; k++) {                                                             \
      lanes right[V];                                                                             \
      _Pragma("GCC unroll 8") for (int v = 0; v < V; v++) right[v] = load(b + k * ldb + v * LANES);  \
      _Pragma("GCC unroll 8") for (int r = 0; r < R; r++) {                                       \
        _Pragma("GCC unroll 8") for (int v = 0; v < V; v++) sums[r][v] += a[r * lda + k] * right[v];  \
      }                                                                                           \
    }                                                                                             \
    for (int r = 0; r < R; r++)                                                                   \
      for (int v = 0; v < V; v++)                                                                 \
        for (int l = 0; l < LANES; l++)                                                           \
          put(c + r * ldc + v * LANES + l, sums[r][v][l], alpha, beta);                           \
  }
STRIP(strip_4x2, 4, 2)
STRIP(strip_1x4, 1, 4)
STRIP(strip_1x2, 1, 2)
STRIP(strip_1x1, 1, 1)

static void rows_by_columns(int m, int n, int depth, float alpha, const float *a, int64_t lda,
                            const float *b, int64_t ldb, float beta, float *c, int64_t ldc) {
  int i = 0;
  for (; i + 4 <= m; i += 4)
    for (int j = 0; j + 16 <= n; j += 16)
      strip_4x2(depth, alpha, a + i * lda, lda, b + j, ldb, beta, c + i * ldc + j, ldc);
  for (int r = 0; r < m; r++) {
    int j = r < i ? n / 16 * 16 : 0;
    for (; j + 32 <= n; j += 32)
      strip_1x4(depth, alpha, a + r * lda, lda, b + j, ldb, beta, c + r * ldc + j, ldc);
    for (; j + 16 <= n; j += 16)
      strip_1x2(depth, alpha, a + r * lda, lda, b + j, ldb, beta, c + r * ldc + j, ldc);
    for (; j + LANES <= n; j += LANES)
      strip_1x1(depth, alpha, a + r * lda, lda, b + j, ldb, beta, c + r * ldc + j, ldc);
    for (; j < n; j++) {
      float sum = 0.0f;
      for (int k = 0; k < depth; k++)
        sum = __builtin_fmaf(a[r * lda + k], b[k * ldb + j], sum);
      put(c + r * ldc + j, sum, alpha, beta);
    }
  }
}

static void rows_by(int tb, int m, int n, int depth, float alpha, const float *a, int64_t lda,
                    const float *b, int64_t ldb, float beta, float *c, int64_t ldc) {
  if (tb == TRANSPOSED)
    rows_by_rows(m, n, depth, alpha, a, lda, b, ldb, beta, c, ldc);
  else
    rows_by_columns(m, n, depth, alpha, a, lda, b, ldb, beta, c, ldc);
}

// What computes while it is set; NULL: this file.
void exo_products_by(product given) { other = given; }

long exo_products_computed(void) { return computed; }

void cblas_sgemm(int order, int ta, int tb, int m, int n, int depth, float alpha, const float *a,
                 int lda, const float *b, int ldb, float beta, float *c, int ldc) {
  if (other) {
    other(order, ta, tb, m, n, depth, alpha, a, lda, b, ldb, beta, c, ldc);
    return;
  }
  computed++;
  if (order != ROW_MAJOR) {  // the same product, seen the other way round
    cblas_sgemm(ROW_MAJOR, tb, ta, n, m, depth, alpha, b, ldb, a, lda, beta, c, ldc);
    return;
  }
  if (ta != TRANSPOSED || m <= 0 || depth <= 0) {
    rows_by(tb, m, n, depth, alpha, a, lda, b, ldb, beta, c, ldc);
    return;
  }
  // Row by row where there is no room for all of A: each number is summed in the same order.
  int rows = m;
  float *turned = malloc(sizeof(float) * (size_t)rows * (size_t)depth);
  if (!turned) turned = malloc(sizeof(float) * (size_t)(rows = 1) * (size_t)depth);
  if (!turned) {
    fprintf(stderr, "no memory for %zu bytes of a product: load the model with a shorter context\n",
            sizeof(float) * (size_t)depth);
    abort();
  }
  for (int first = 0; first < m; first += rows) {
    for (int k = 0; k < depth; k++)
      for (int i = 0; i < rows; i++)
        turned[(size_t)i * depth + k] = a[(size_t)k * lda + first + i];
    rows_by(tb, rows, n, depth, alpha, turned, depth, b, ldb, beta, c + (int64_t)first * ldc, ldc);
  }
  free(turned);
}

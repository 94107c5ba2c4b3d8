// Metal's language, as far as MLX's kernels of few rows need it, on the emulator's threads. A sum over
// a simdgroup adds neighbours first; each operation is rounded as it is written. Real devices may do
// either otherwise: so which rows have the same bits is shown here, and not which bits.
#include "emulator.h"
#pragma GCC optimize("fp-contract=off")

#include <limits>
#include <random>
#include <type_traits>

#define METAL_FUNC inline
#define MLX_MTL_PRAGMA_UNROLL
#define device
#define constant
#define thread
#define threadgroup  // an array of one is made static before the text is compiled

typedef unsigned uint;
typedef unsigned short ushort;
typedef unsigned char uchar;
typedef _Float16 half;
typedef half float16_t;

struct bfloat {
  __nv_bfloat16 held;
  bfloat(float f = 0) : held(__float2bfloat16_rn(f)) {}
  operator float() const { return __bfloat162float(held); }
  bfloat& operator+=(float f) { return *this = bfloat(*this + f); }
  bfloat& operator*=(float f) { return *this = bfloat(*this * f); }
};
typedef bfloat bfloat16_t;
struct complex64_t {};

template <class T, int N> struct vec;
template <class T> struct vec<T, 2> {
  T x = 0, y = 0;
};
template <class T> struct vec<T, 3> {
  T x = 0, y = 0, z = 0;
};
template <class T> struct vec<T, 4> {
  T x = 0, y = 0, z = 0, w = 0;
  vec() {}
  vec(T a, T b, T c, T d) : x(a), y(b), z(c), w(d) {}
  template <class U> explicit vec(const vec<U, 4>& o) : x(o.x), y(o.y), z(o.z), w(o.w) {}
  T& operator[](int i) { return (&x)[i]; }
  const T& operator[](int i) const { return (&x)[i]; }
};
typedef vec<uint, 2> metal_uint2;
typedef vec<uint, 3> uint3;
typedef vec<short, 2> short2;
typedef vec<unsigned long, 2> ulong2;
typedef vec<float, 4> metal_float4;
#define uint2 metal_uint2  // the emulator's own are CUDA's
#define float4 metal_float4

namespace metal {
using ::vec;
template <class T> using uniform = T;
template <class T> constexpr T make_uniform(T v) { return v; }
template <class T> struct numeric_limits : std::numeric_limits<T> {};
template <class T> T min(T a, T b) { return b < a ? b : a; }
template <class T> T max(T a, T b) { return a < b ? b : a; }
inline uint min(uint a, int b) { return min(a, (uint)b); }
inline int min(int a, short b) { return min(a, (int)b); }
template <class T> T clamp(T v, T low, T high) { return min(max(v, low), high); }
template <class To, class From> To as_type(From from) { return bits_as<To>(from); }
template <class T> T select(T no, T yes, bool which) { return which ? yes : no; }
inline float abs(float a) { return fabsf(a); }
inline float log2(float a) { return log2f(a); }
inline float round(float a) { return roundf(a); }
inline bool isnan(float a) { return a != a; }
inline bool isfinite(float a) { return std::isfinite(a); }
inline bool signbit(float a) { return std::signbit(a); }
inline float exp(float a) { return expf(a); }
inline float dot(float4 a, float4 b) {
  return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
}
namespace fast {
using metal::exp;
inline float exp2(float a) { return exp2f(a); }
}  // namespace fast

enum class mem_flags { mem_none, mem_threadgroup, mem_device };
// Threads that have ended are not waited for; the first of the others sees when all have come.
inline void threadgroup_barrier(mem_flags) {
  const int mine = turn;
  for (++arrived; turn == mine;) {
    int first = 0, running = 0;
    while (ended[first]) ++first;
    for (int i = first; now == first && i < threads; ++i) running += !ended[i];
    if (arrived == running) {
      arrived = 0;
      ++turn;
    } else {
      wait();
    }
  }
}
inline void simdgroup_barrier(mem_flags) { __syncwarp(); }

// What each lane of this simdgroup gave. Two of them take turns: no lane can be two calls ahead.
inline const float* gathered(float v) {
  static float given[2][MOST];
  float* lanes = given[turn_of[now / 32] & 1];
  lanes[now] = v;
  __syncwarp();
  return lanes + (now & ~31);
}
template <class F> float joined(float v, F join) {
  float t[32];
  memcpy(t, gathered(v), sizeof t);
  for (int width = 1; width < 32; width *= 2)
    for (int i = 0; i < 32; i += 2 * width) t[i] = join(t[i], t[i + width]);
  return t[0];
}
inline float simd_sum(float v) {
  return joined(v, [](float a, float b) { return a + b; });
}
inline float simd_max(float v) {
  return joined(v, [](float a, float b) { return max(a, b); });
}
inline float simd_shuffle_down(float v, int by) {
  const int lane = now & 31;
  return gathered(v)[lane + by < 32 ? lane + by : lane];
}
inline float quad_sum(float v) {
  const float* f = gathered(v) + (now & 28);
  return (f[0] + f[1]) + (f[2] + f[3]);
}
}  // namespace metal
using namespace metal;

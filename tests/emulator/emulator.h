// Runs a CUDA kernel's text on a CPU, one block at a time, a fiber for each thread. Collectives wait
// for all lanes; asynchronous copies happen when they are waited for and leave NaN until then, so that
// a missing wait shows; shared memory begins as NaN.
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define EXO_EMULATED
#define __device__
#define __global__
#define __forceinline__ inline
#define __align__(x) __attribute__((aligned(x)))
#define __shared__ static

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float4 { float x, y, z, w; };
inline uint4 make_uint4(unsigned a, unsigned b, unsigned c, unsigned d) { return {a, b, c, d}; }
inline float4 make_float4(float a, float b, float c, float d) { return {a, b, c, d}; }
struct __nv_bfloat16 { uint16_t bits; };
typedef _Float16 __half;

template <class To, class From> To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "sizes");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
inline float __bfloat162float(__nv_bfloat16 b) { return bits_as<float>((unsigned)b.bits << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float f) {
  unsigned u = bits_as<unsigned>(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
  u += 0x7fff + ((u >> 16) & 1);
  return {(uint16_t)(u >> 16)};
}
inline float __half2float(__half h) { return (float)h; }
inline __half __float2half_rn(float f) { return (__half)f; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float rsqrtf(float a) { return 1.0f / sqrtf(a); }
template <class T> T __ldg(const T* p) { return *p; }

struct Dim3 { int x, y, z; };
constexpr int MOST = 1024;
inline Dim3 blockIdx, gridDim, every_thread[MOST];
inline int now, threads;
#define threadIdx (every_thread[now])
alignas(128) inline unsigned char dynamic_shared[240 * 1024];

inline ucontext_t fiber[MOST];
inline jmp_buf place[MOST], home_place;
inline bool ended[MOST], begun[MOST];
inline std::vector<char> stack[MOST];
inline std::function<void()> body;
inline void wait() {  // not by swapcontext, which asks the kernel twice
  if (!_setjmp(place[now])) _longjmp(home_place, 1);
}
inline void resume(int i) {
  if (_setjmp(home_place)) return;
  if (begun[i]) _longjmp(place[i], 1);
  begun[i] = true;
  setcontext(&fiber[i]);
}

inline int arrived, turn, arrived_in[MOST / 32], turn_of[MOST / 32];
inline void __syncthreads() {
  const int mine = turn;
  if (++arrived == threads) { arrived = 0; ++turn; return; }
  while (turn == mine) wait();
}
inline void __syncwarp() {
  const int w = now / 32, mine = turn_of[w];
  if (++arrived_in[w] == 32) { arrived_in[w] = 0; ++turn_of[w]; return; }
  while (turn_of[w] == mine) wait();
}
inline float handed[MOST];
inline float __shfl_xor_sync(unsigned, float v, int bit) {
  handed[now] = v;
  __syncwarp();
  const float got = handed[(now & ~31) | ((now & 31) ^ bit)];
  __syncwarp();
  return got;
}

namespace exo {
struct Copy { void* to; const void* from; int bytes; };
inline std::vector<std::vector<Copy>> copies[MOST];  // groups; the last one is open
inline void copy_later(void* to, const void* from, int bytes) {
  if ((uintptr_t)to % bytes || (uintptr_t)from % bytes) { puts("misaligned copy"); exit(3); }
  copies[now].back().push_back({to, from, bytes});
  memset(to, 0xff, bytes);
}
inline void copy16(void* to, const void* from) { copy_later(to, from, 16); }
inline void copy16_cached(void* to, const void* from) { copy_later(to, from, 16); }
inline void copy8(void* to, const void* from) { copy_later(to, from, 8); }
inline void copy4(void* to, const void* from) { copy_later(to, from, 4); }
inline void copies_end() { copies[now].emplace_back(); }
template <int LEFT> void copies_wait() {
  auto& groups = copies[now];
  while ((int)groups.size() - 1 > LEFT) {
    for (const Copy& c : groups.front()) memcpy(c.to, c.from, c.bytes);
    groups.erase(groups.begin());
  }
}

inline unsigned of_a[MOST][4], of_b[MOST][2];
template <class T> float part_of(unsigned u, int high) {
  const uint16_t bits = high ? u >> 16 : u & 0xffff;
  if constexpr (sizeof(T) == sizeof(__nv_bfloat16) && !std::is_same<T, __half>::value)
    return __bfloat162float({bits});
  else
    return (float)bits_as<__half>(bits);
}
template <class T>
void mma(T, float* c, const unsigned* a, unsigned b0, unsigned b1) {  // m16n8k16
  memcpy(of_a[now], a, 16);
  of_b[now][0] = b0;
  of_b[now][1] = b1;
  __syncwarp();
  const int base = now & ~31, g = (now & 31) >> 2, t = now & 3;
  for (int i = 0; i < 4; ++i) {
    const int row = g + (i >> 1) * 8, n = 2 * t + (i & 1);
    double sum = c[i];
    for (int k = 0; k < 16; ++k) {
      const int from_a = base + row % 8 * 4 + k % 8 / 2, from_b = base + n * 4 + k % 8 / 2;
      sum += (double)part_of<T>(of_a[from_a][(k >= 8) * 2 + (row >= 8)], k & 1) *
             part_of<T>(of_b[from_b][k >= 8], k & 1);
    }
    c[i] = (float)sum;
  }
  __syncwarp();
}
template <class T>
void mma_first(T kind, float* c, const unsigned* a, unsigned b0, unsigned b1) {
  for (int i = 0; i < 4; ++i) c[i] = 0.0f;
  mma(kind, c, a, b0, b1);
}
inline void store16(float* to, float a, float b, float c, float d) {
  if ((uintptr_t)to % 16) { puts("misaligned store"); exit(3); }
  to[0] = a; to[1] = b; to[2] = c; to[3] = d;
}
inline unsigned nibbles_or(unsigned u, unsigned o) { return (u & 0x000f000fu) | o; }
inline unsigned permute(unsigned a, unsigned b, unsigned s) {
  unsigned char bytes[8];
  memcpy(bytes, &a, 4);
  memcpy(bytes + 4, &b, 4);
  unsigned made = 0;
  for (int i = 0; i < 4; ++i) made |= (unsigned)bytes[(s >> (4 * i)) & 7] << (8 * i);
  return made;
}
}  // namespace exo

inline void enter() {
  body();
  ended[now] = true;
  _longjmp(home_place, 1);
}

inline void launch(Dim3 grid, int count, size_t shared, std::function<void()> kernel) {
  threads = count;
  gridDim = grid;
  body = kernel;
  for (int z = 0; z < grid.z; ++z)
    for (int y = 0; y < grid.y; ++y)
      for (int x = 0; x < grid.x; ++x) {
        blockIdx = {x, y, z};
        memset(dynamic_shared, 0xff, sizeof dynamic_shared);
        for (int i = 0; i < count; ++i) {
          every_thread[i] = {i, 0, 0};
          ended[i] = begun[i] = false;
          exo::copies[i].assign(1, {});
          stack[i].resize(64 * 1024);
          getcontext(&fiber[i]);
          fiber[i].uc_stack.ss_sp = stack[i].data();
          fiber[i].uc_stack.ss_size = stack[i].size();
          fiber[i].uc_link = nullptr;
          makecontext(&fiber[i], enter, 0);
        }
        for (int left = count; left;) {
          left = 0;
          for (now = 0; now < count; ++now)
            if (!ended[now]) {
              resume(now);
              left += !ended[now];
            }
        }
        for (size_t i = shared; i < shared + 32 * 1024 && i < sizeof dynamic_shared; ++i)
          if (dynamic_shared[i] != 0xff) { puts("written beyond the shared memory"); exit(4); }
      }
}

struct Shape { std::vector<int> sizes; int operator[](int i) const { return sizes[i]; } };
template <class T> std::vector<T> read(const char* name) {
  FILE* file = fopen(name, "rb");
  fseek(file, 0, SEEK_END);
  std::vector<T> data(ftell(file) / sizeof(T));
  rewind(file);
  if (fread(data.data(), sizeof(T), data.size(), file) != data.size()) abort();
  fclose(file);
  return data;
}
template <class T> void write(const char* name, const std::vector<T>& data) {
  FILE* file = fopen(name, "wb");
  fwrite(data.data(), sizeof(T), data.size(), file);
  fclose(file);
}

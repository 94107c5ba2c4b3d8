// Shared parts of the kernels: number types, 16-byte loads, asynchronous copies, sums over lanes.
// A build on a CPU (tests of indices) defines EXO_EMULATED and brings its own copies and mma.
#pragma once

namespace exo {

__device__ __forceinline__ float num(float v) { return v; }
__device__ __forceinline__ float num(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float num(__half v) { return __half2float(v); }

template <class T> __device__ __forceinline__ T as(float v);
template <> __device__ __forceinline__ float as<float>(float v) { return v; }
template <> __device__ __forceinline__ __nv_bfloat16 as<__nv_bfloat16>(float v) {
  return __float2bfloat16_rn(v);
}
template <> __device__ __forceinline__ __half as<__half>(float v) { return __float2half_rn(v); }

// `v` rounded to a number of type T.
template <class T> __device__ __forceinline__ float rounded(float v) { return num(as<T>(v)); }

// The numbers in 16 bytes.
template <class T> constexpr int PER_CHUNK = 16 / sizeof(T);

// COUNT numbers from the 16-byte chunks at p, p + stride, p + 2 stride, ..
template <int COUNT, class T>
__device__ __forceinline__ void unpack(const T* p, int stride, float* out) {
  constexpr int N = PER_CHUNK<T>;
#pragma unroll
  for (int c = 0; c < COUNT / N; ++c) {
    const uint4 raw = *reinterpret_cast<const uint4*>(p + c * stride);
    const T* each = reinterpret_cast<const T*>(&raw);
#pragma unroll
    for (int i = 0; i < N; ++i) out[c * N + i] = num(each[i]);
  }
}

// The sum over groups of LANES neighbouring lanes, on every lane.
template <int LANES> __device__ __forceinline__ float lane_sum(float v) {
#pragma unroll
  for (int bit = 1; bit < LANES; bit <<= 1) v += __shfl_xor_sync(0xffffffffu, v, bit);
  return v;
}

__device__ __forceinline__ float sigmoid(float v) { return 1.0f / (1.0f + expf(-v)); }

#ifndef EXO_EMULATED
__device__ __forceinline__ unsigned shared_address(const void* p) {
  return (unsigned)__cvta_generic_to_shared(p);
}
__device__ __forceinline__ void copy16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from)
               : "memory");
}
// The same through the first cache, for what other blocks read as well.
__device__ __forceinline__ void copy16_cached(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from)
               : "memory");
}
__device__ __forceinline__ void copy8(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(to)), "l"(from)
               : "memory");
}
__device__ __forceinline__ void copy4(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from)
               : "memory");
}
__device__ __forceinline__ void copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
__device__ __forceinline__ void mma(__nv_bfloat16, float* c, const unsigned* a, unsigned b0,
                                    unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma(__half, float* c, const unsigned* a, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// c = a b, as `mma` with c = 0 before: without an instruction for each zero.
__device__ __forceinline__ void mma_first(__nv_bfloat16, float* c, const unsigned* a, unsigned b0,
                                          unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%10,%10,%10};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}
__device__ __forceinline__ void mma_first(__half, float* c, const unsigned* a, unsigned b0,
                                          unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%10,%10,%10};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}
// Four floats to a 16-byte place in one store: the compiler makes four of a float4.
__device__ __forceinline__ void store16(float* to, float a, float b, float c, float d) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
}
// (u & 0x000f000f) | o in one instruction: the compiler makes two of it where both are constants.
__device__ __forceinline__ unsigned nibbles_or(unsigned u, unsigned o) {
  unsigned r;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(u), "n"(0x000f000f), "r"(o));
  return r;
}
__device__ __forceinline__ unsigned permute(unsigned a, unsigned b, unsigned s) {
  return __byte_perm(a, b, s);
}
#endif

}  // namespace exo

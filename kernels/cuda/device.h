// What every kernel uses of the device, without CUDA's headers: integer types, shuffles, asynchronous copies, half
// conversions, correctly rounded arithmetic. Under the host shim the same names are plain C++.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct alignas(16) Words4 {
    u32 x, y, z, w;
};
struct alignas(8) Words2 {
    u32 x, y;
};
struct alignas(16) Float4 {
    float x, y, z, w;
};

#ifdef DP_HOST_SHIM

#define DP_SHARED(name) unsigned char* const name = dp_shim::machine().shared
#define DP_UNROLL

__device__ inline u32 float_bits(float x) {
    u32 bits;
    memcpy(&bits, &x, 4);
    return bits;
}
__device__ inline float bits_float(u32 bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
__device__ inline float half_to_float(u16 h) {
    const u32 magnitude = h & 0x7fffu, sign = u32(h & 0x8000u) << 16;
    if (magnitude >= 0x7c00u) return bits_float(sign | 0x7f800000u | (magnitude << 13));
    return bits_float(sign | float_bits(bits_float(magnitude << 13) * bits_float(0x77800000u)));
}
// Nearest even, as cvt.rn: infinite from 65520 on.
__device__ inline u16 float_to_half(float x) {
    const u32 bits = float_bits(x), magnitude = bits & 0x7fffffffu, sign = (bits >> 16) & 0x8000u;
    if (magnitude > 0x7f800000u) return 0x7fff;
    if (magnitude >= 0x477ff000u) return u16(sign | 0x7c00u);
    if (magnitude < 0x38800000u) return u16(sign | u32(std::nearbyint(bits_float(magnitude) * 16777216.0f)));
    return u16(sign | (((magnitude + 0xfffu + ((magnitude >> 13) & 1u)) >> 13) - (112u << 10)));
}
// Byte i of the result is byte (selector >> 4 * i) & 7 of the eight bytes hi:lo; 8 is added for its sign, spread.
__device__ inline u32 permute_bytes(u32 lo, u32 hi, u32 selector) {
    const u64 bytes = (u64(hi) << 32) | lo;
    u32 result = 0;
    for (int i = 0; i < 4; ++i) {
        const u32 choice = selector >> (4 * i);
        u32 byte = u32(bytes >> (8 * (choice & 7u))) & 0xffu;
        if (choice & 8u) byte = byte & 0x80u ? 0xffu : 0;
        result |= byte << (8 * i);
    }
    return result;
}
// In each half of a word: the larger magnitude.
__device__ inline u32 max_magnitude_halves(u32 a, u32 b) {
    const u32 low_a = a & 0x7fffu, low_b = b & 0x7fffu, high_a = a & 0x7fff0000u, high_b = b & 0x7fff0000u;
    return (low_a > low_b ? low_a : low_b) | (high_a > high_b ? high_a : high_b);
}
__device__ inline float exp2_fast(float x) { return std::exp2(x); }
__device__ inline float round_even(float x) { return std::nearbyint(x); }
__device__ inline float fma_rn(float a, float b, float c) { return std::fma(a, b, c); }
__device__ inline float mul_rn(float a, float b) { return a * b; }
__device__ inline float add_rn(float a, float b) { return a + b; }
__device__ inline float div_rn(float a, float b) { return a / b; }
__device__ inline float sqrt_rn(float x) { return std::sqrt(x); }
__device__ inline float max_f(float a, float b) { return a > b ? a : b; }
__device__ inline float min_f(float a, float b) { return a < b ? a : b; }
__device__ inline void copy_16_async(void* shared, const void* global, bool valid) {
    if (valid)
        memcpy(shared, global, 16);
    else
        memset(shared, 0, 16);
}
__device__ inline void copies_commit() {}
template <int PENDING>
__device__ inline void copies_wait() {}

// A macro, so that every use in the source is an operation of its own.
#define shuffle_xor(value, mask)                                                                        \
    ([](float dp_value, int dp_mask) {                                                                  \
        static const char dp_operation = 0;                                                             \
        return bits_float(dp_shim::exchange(float_bits(dp_value), (threadIdx.x & 31) ^ dp_mask, &dp_operation)); \
    }((value), (mask)))

#else

#define DP_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#define DP_UNROLL _Pragma("unroll")

__device__ __forceinline__ u32 float_bits(float x) { return __float_as_uint(x); }
__device__ __forceinline__ float bits_float(u32 bits) { return __uint_as_float(bits); }
__device__ __forceinline__ float half_to_float(u16 h) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
    return x;
}
__device__ __forceinline__ u16 float_to_half(float x) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
}
__device__ __forceinline__ u32 permute_bytes(u32 lo, u32 hi, u32 selector) {
    u32 result;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(lo), "r"(hi), "r"(selector));
    return result;
}
__device__ __forceinline__ u32 max_magnitude_halves(u32 a, u32 b) {
    u32 result;
    asm("{.reg .b32 x, y; abs.f16x2 x, %1; abs.f16x2 y, %2; max.f16x2 %0, x, y;}" : "=r"(result) : "r"(a), "r"(b));
    return result;
}
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float round_even(float x) { return rintf(x); }
__device__ __forceinline__ float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ __forceinline__ float mul_rn(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float add_rn(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float div_rn(float a, float b) { return __fdiv_rn(a, b); }
__device__ __forceinline__ float sqrt_rn(float x) { return __fsqrt_rn(x); }
__device__ __forceinline__ float max_f(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ float min_f(float a, float b) { return fminf(a, b); }
__device__ __forceinline__ float shuffle_xor(float value, int mask) {
    return __shfl_xor_sync(0xffffffffu, value, mask);
}
// 16 bytes from global to shared memory without passing through registers; zeros where not valid.
__device__ __forceinline__ void copy_16_async(void* shared, const void* global, bool valid) {
    const u32 address = u32(__cvta_generic_to_shared(shared));
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

#endif

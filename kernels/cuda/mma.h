// Tensor core products of 16-bit values with fp32 sums, and arithmetic on pairs of 16-bit values in a word.
//
// KIND is 1 for bf16, 2 for fp16, as for activations in codecs.h.
#pragma once
#include "codecs.h"

template <int KIND>
struct Pairs;

template <>
struct Pairs<1> {
    static constexpr u32 ONES = 0x3f803f80u;
};
template <>
struct Pairs<2> {
    static constexpr u32 ONES = 0x3c003c00u;
};

// One of the two values of a word, the lower half first.
template <int KIND>
__device__ __forceinline__ float pair_element(u32 pair, int element) {
    const u16 bits = u16(pair >> (16 * element));
    return KIND == 1 ? bits_float(u32(bits) << 16) : half_to_float(bits);
}

#ifdef DP_HOST_SHIM

template <int KIND>
__device__ inline u32 pack_pair(float low, float high) {
    return KIND == 1 ? float_to_bfloat(low) | u32(float_to_bfloat(high)) << 16
                     : float_to_half(low) | u32(float_to_half(high)) << 16;
}

template <int KIND>
__device__ inline u32 fma_pairs(u32 a, u32 b, u32 c) {
    u32 result = 0;
    for (int i = 0; i < 2; ++i) {
        const float x = std::fma(pair_element<KIND>(a, i), pair_element<KIND>(b, i),
                                 pair_element<KIND>(c, i));
        result |= u32(KIND == 1 ? float_to_bfloat(x) : float_to_half(x)) << (16 * i);
    }
    return result;
}

// What every lane of a warp brings to a product, element by element. Two sets, used in turn, as for the shim's exchanges.
struct Fragments {
    float a[8], b[4];
};
static thread_local Fragments fragments[2][dp_shim::MAX_THREADS];

template <int KIND>
__device__ inline void multiply_tile(float* sums, const u32* a, const u32* b) {
    static const char operation = 0;
    const unsigned self = threadIdx.x, first = self & ~31u, lane = self & 31u;
    Fragments* const all = fragments[dp_shim::machine().fibers[self].rounds & 1];
    for (int i = 0; i < 8; ++i) all[self].a[i] = pair_element<KIND>(a[i / 2], i % 2);
    for (int i = 0; i < 4; ++i) all[self].b[i] = pair_element<KIND>(b[i / 2], i % 2);
    dp_shim::exchange(0, 0, &operation);
    for (unsigned i = 0; i < 4; ++i) {
        const unsigned row = i / 2, column = lane % 4 * 2 + i % 2;
        for (unsigned k = 0; k < 16; ++k) {
            const unsigned owner = k % 8 / 2, upper = k / 8;
            const float left = all[first + lane / 4 * 4 + owner].a[2 * (row + 2 * upper) + k % 2];
            const float right = all[first + column * 4 + owner].b[2 * upper + k % 2];
            sums[i] = std::fma(left, right, sums[i]);
        }
    }
}

__device__ inline u32 mask_or(u32 word, u32 mask, u32 added) { return (word & mask) | added; }
__device__ inline Words4 load_once(const Words4* address) { return *address; }
__device__ inline float shuffle_from(float value, int lane) {
    static const char operation = 0;
    return bits_float(dp_shim::exchange(float_bits(value), lane, &operation));
}

#else

// Two values in a word, each rounded to nearest even.
template <int KIND>
__device__ __forceinline__ u32 pack_pair(float low, float high) {
    u32 pair;
    if (KIND == 1)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// a * b + c, rounded once, in both halves.
template <int KIND>
__device__ __forceinline__ u32 fma_pairs(u32 a, u32 b, u32 c) {
    u32 result;
    if (KIND == 1)
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    else
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    return result;
}

// sums [16, 8] += a [16, 16] b [16, 8], spread over a warp as PTX's mma.m16n8k16 says: with g = lane / 4, t = lane % 4,
// a[0] is row g, columns 2t and 2t + 1; a[1] row g + 8; a[2] and a[3] the same rows, columns + 8; b[0] rows 2t and
// 2t + 1 of column g; b[1] rows + 8; sums[0], [1] row g, columns 2t and 2t + 1; sums[2], [3] row g + 8.
// A column of the result depends on that column of b alone.
template <int KIND>
__device__ __forceinline__ void multiply_tile(float* sums, const u32* a, const u32* b) {
    if (KIND == 1)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// (word & mask) | added as one instruction, which the compiler does not make of two constants.
__device__ __forceinline__ u32 mask_or(u32 word, u32 mask, u32 added) {
    u32 result;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(word), "r"(mask), "r"(added));
    return result;
}

__device__ __forceinline__ float shuffle_from(float value, int lane) {
    return __shfl_sync(0xffffffffu, value, lane);
}

// For data that is read once: it does not displace what the L1 cache holds.
__device__ __forceinline__ Words4 load_once(const Words4* address) {
    Words4 words;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
        : "l"(address));
    return words;
}

#endif

// Two signed bytes, each at the bottom of a half, as a pair, exact: the lower seven bits under the exponent of 1024
// (fp16) or 128 (bf16), less that number with the sign bit in the same place, which counts 128.
template <int KIND>
__device__ __forceinline__ u32 pair_of_bytes(u32 bytes) {
    constexpr u32 NUMBER = KIND == 1 ? 0x43004300u : 0x64006400u;
    return fma_pairs<KIND>(mask_or(bytes, 0x007f007fu, NUMBER), Pairs<KIND>::ONES,
                           mask_or(bytes, 0x00800080u, NUMBER | 0x80008000u));
}

// The KV codecs on the device. Numbers are those of codecs.py; fp8_kind 0 is E4M3, 1 is E5M2.
//
// Decoding takes four neighbouring elements at a time, from one word (one-byte codecs) or two (two-byte codecs), and
// has no branches. Decoded values are `FACTOR` times too small; the caller multiplies where that is cheap.
#pragma once
#include "device.h"

#define CODEC_BF16 1
#define CODEC_FP16 2
#define CODEC_INT8 3
#define CODEC_E4M3 4
#define CODEC_E5M2 5

#define LARGEST_SCALE 65504.0f
#define LARGEST_CODE 127.0f

// What decoding must remember of the codes that it saw: nothing, except where NaN codes need care.
struct NoMemory {
    __device__ __forceinline__ float poison(int) const { return 0.0f; }
};

// E4M3 has no room for NaN in the bit move: codes 0x7f and 0xff come out as 480. The largest magnitude is kept for each
// element position modulo four; `poison` is NaN if a NaN code was among them, else 0.
struct LargestHalves {
    u32 pairs[2] = {0, 0};
    __device__ __forceinline__ float poison(int element) const {
        const u32 half = (pairs[element >> 1] >> (16 * (element & 1))) & 0x7fffu;
        return bits_float(half > 0x3f00u ? 0x7fc00000u : 0);
    }
};

__device__ __forceinline__ void unpack_halves(u32 word, float* values) {
    values[0] = half_to_float(u16(word & 0xffffu));
    values[1] = half_to_float(u16(word >> 16));
}

template <int CODEC>
struct Decoder;

template <>
struct Decoder<CODEC_FP16> {
    static constexpr int ITEM_BYTES = 2;
    static constexpr bool SCALED = false;
    static constexpr float FACTOR = 1.0f, LIMIT = 65504.0f;
    typedef NoMemory Memory;
    static __device__ __forceinline__ void decode4(const u32* words, float* values, Memory&) {
        unpack_halves(words[0], values);
        unpack_halves(words[1], values + 2);
    }
};

template <>
struct Decoder<CODEC_BF16> {
    static constexpr int ITEM_BYTES = 2;
    static constexpr bool SCALED = false;
    static constexpr float FACTOR = 1.0f, LIMIT = 3.3895313892515355e38f;
    typedef NoMemory Memory;
    static __device__ __forceinline__ void decode4(const u32* words, float* values, Memory&) {
        values[0] = bits_float(words[0] << 16);
        values[1] = bits_float(words[0] & 0xffff0000u);
        values[2] = bits_float(words[1] << 16);
        values[3] = bits_float(words[1] & 0xffff0000u);
    }
};

// code + 128 becomes the low byte of the float 2^23 + code + 128.
template <>
struct Decoder<CODEC_INT8> {
    static constexpr int ITEM_BYTES = 1;
    static constexpr bool SCALED = true;
    static constexpr float FACTOR = 1.0f, LIMIT = LARGEST_CODE * LARGEST_SCALE;
    typedef NoMemory Memory;
    static __device__ __forceinline__ void decode4(const u32* words, float* values, Memory&) {
        const u32 shifted = words[0] ^ 0x80808080u;
        values[0] = bits_float(permute_bytes(shifted, 0x4b000000u, 0x7440u)) - 8388736.0f;
        values[1] = bits_float(permute_bytes(shifted, 0x4b000000u, 0x7441u)) - 8388736.0f;
        values[2] = bits_float(permute_bytes(shifted, 0x4b000000u, 0x7442u)) - 8388736.0f;
        values[3] = bits_float(permute_bytes(shifted, 0x4b000000u, 0x7443u)) - 8388736.0f;
    }
};

// Two codes are spread to 16 bits with their signs repeated, moved up by 7, and the surplus sign is cleared: halves
// that are 2^8 times too small, subnormals included.
template <>
struct Decoder<CODEC_E4M3> {
    static constexpr int ITEM_BYTES = 1;
    static constexpr bool SCALED = false;
    static constexpr float FACTOR = 256.0f, LIMIT = 448.0f;
    typedef LargestHalves Memory;
    static __device__ __forceinline__ void decode4(const u32* words, float* values, Memory& memory) {
        const u32 low = (permute_bytes(words[0], 0, 0x9180u) << 7) & 0xbf80bf80u;
        const u32 high = (permute_bytes(words[0], 0, 0xb3a2u) << 7) & 0xbf80bf80u;
        memory.pairs[0] = max_magnitude_halves(memory.pairs[0], low);
        memory.pairs[1] = max_magnitude_halves(memory.pairs[1], high);
        unpack_halves(low, values);
        unpack_halves(high, values + 2);
    }
};

// A code is the upper byte of a half.
template <>
struct Decoder<CODEC_E5M2> {
    static constexpr int ITEM_BYTES = 1;
    static constexpr bool SCALED = false;
    static constexpr float FACTOR = 1.0f, LIMIT = 57344.0f;
    typedef NoMemory Memory;
    static __device__ __forceinline__ void decode4(const u32* words, float* values, Memory&) {
        unpack_halves(permute_bytes(words[0], 0, 0x1404u), values);
        unpack_halves(permute_bytes(words[0], 0, 0x3424u), values + 2);
    }
};

// Rounds to nearest even to the `MANTISSA` bits of a format whose exponents start at 2^LEAST_EXPONENT; smaller values
// become multiples of the least subnormal. The argument is finite and within the format's limit.
template <int MANTISSA, int LEAST_EXPONENT>
__device__ __forceinline__ u32 round_to_float8(float x) {
    const u32 magnitude = float_bits(x) & 0x7fffffffu, sign = (float_bits(x) >> 24) & 0x80u;
    constexpr int DROPPED = 23 - MANTISSA;
    constexpr u32 LEAST_NORMAL = u32(127 + LEAST_EXPONENT) << 23;
    constexpr float UNITS = float(1 << (MANTISSA - LEAST_EXPONENT));
    const u32 normal = ((magnitude + (1u << (DROPPED - 1)) - 1u + ((magnitude >> DROPPED) & 1u)) >> DROPPED) -
                       (u32(126 + LEAST_EXPONENT) << MANTISSA);
    const u32 subnormal = u32(round_even(bits_float(magnitude) * UNITS));
    return sign | (magnitude < LEAST_NORMAL ? subnormal : normal);
}

__device__ __forceinline__ u16 float_to_bfloat(float x) {
    const u32 bits = float_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return u16((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Stores one element that is finite and within the codec's limit. `scale` is the stored scale of int8.
template <int CODEC>
__device__ __forceinline__ void encode(float x, float scale, u8* row, int element) {
    if (CODEC == CODEC_FP16) reinterpret_cast<u16*>(row)[element] = float_to_half(x);
    if (CODEC == CODEC_BF16) reinterpret_cast<u16*>(row)[element] = float_to_bfloat(x);
    if (CODEC == CODEC_E4M3) row[element] = u8(round_to_float8<3, -6>(x));
    if (CODEC == CODEC_E5M2) row[element] = u8(round_to_float8<2, -14>(x));
    if (CODEC == CODEC_INT8) {
        const float code = scale > 0.0f ? round_even(div_rn(x, scale)) : 0.0f;
        row[element] = u8(int(max_f(min_f(code, LARGEST_CODE), -LARGEST_CODE)));
    }
}

// Activations: 0 fp32, 1 bf16, 2 fp16.
template <int KIND>
__device__ __forceinline__ float load_activation(const void* base, i64 index) {
    if (KIND == 0) return static_cast<const float*>(base)[index];
    const u16 bits = static_cast<const u16*>(base)[index];
    return KIND == 1 ? bits_float(u32(bits) << 16) : half_to_float(bits);
}
template <int KIND>
__device__ __forceinline__ void store_activation(void* base, i64 index, float x) {
    if (KIND == 0)
        static_cast<float*>(base)[index] = x;
    else
        static_cast<u16*>(base)[index] = KIND == 1 ? float_to_bfloat(x) : float_to_half(x);
}

// Stored codes as pairs of 16-bit floats, exactly, for the tensor cores: 16 bytes at a time. NaN and infinity stay what
// they are. int8 codes become whole numbers; their scale is the caller's business.
#pragma once
#include "mma.h"

// KIND: what the tensor cores take the pairs as, 1 bf16, 2 fp16. PAIRS: of a piece of 16 bytes.
template <int CODEC>
struct Halves {
    static constexpr int KIND = CODEC == CODEC_BF16 ? 1 : 2, PAIRS = 4;
    static __device__ __forceinline__ void unpack(const u32* words, u32* pairs) {
        DP_UNROLL
        for (int i = 0; i < PAIRS; ++i) pairs[i] = words[i];
    }
};

template <>
struct Halves<CODEC_INT8> {
    static constexpr int KIND = 2, PAIRS = 8;
    static __device__ __forceinline__ void unpack(const u32* words, u32* pairs) {
        DP_UNROLL
        for (int i = 0; i < PAIRS; ++i) pairs[i] = pair_of_bytes<2>(permute_bytes(words[i / 2], 0, i % 2 ? 0x4342u : 0x4140u));
    }
};

// As in codecs.h, then times 2^8. The seven bits of a NaN code plus one carry into the highest bit of the exponent.
template <>
struct Halves<CODEC_E4M3> {
    static constexpr int KIND = 2, PAIRS = 8;
    static __device__ __forceinline__ void unpack(const u32* words, u32* pairs) {
        DP_UNROLL
        for (int i = 0; i < PAIRS; ++i) {
            const u32 pair = (permute_bytes(words[i / 2], 0, i % 2 ? 0xb3a2u : 0x9180u) << 7) & 0xbf80bf80u;
            const u32 carried = (pair & 0x3f803f80u) + 0x00800080u;
            pairs[i] = fma_pairs<2>(pair | (carried & 0x40004000u), 0x5c005c00u, 0x80008000u);
        }
    }
};

template <>
struct Halves<CODEC_E5M2> {
    static constexpr int KIND = 2, PAIRS = 8;
    static __device__ __forceinline__ void unpack(const u32* words, u32* pairs) {
        DP_UNROLL
        for (int i = 0; i < PAIRS; ++i) pairs[i] = permute_bytes(words[i / 2], 0, i % 2 ? 0x3424u : 0x1404u);
    }
};

// Two values as a pair that is rounded, and the pair of what the rounding left.
template <int KIND>
__device__ __forceinline__ void split_pair(float low, float high, u32& rounded, u32& rest) {
    rounded = pack_pair<KIND>(low, high);
    rest = pack_pair<KIND>(low - pair_element<KIND>(rounded, 0), high - pair_element<KIND>(rounded, 1));
}

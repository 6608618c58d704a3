// Four neighbouring activations at a time, as fp32: one access of 16 bytes (KIND 0, fp32) or 8 (1 bf16, 2 fp16).
#pragma once
#include "codecs.h"

template <int KIND>
__device__ __forceinline__ Float4 load_four(const void* base, i64 index) {
    if (KIND == 0) return *reinterpret_cast<const Float4*>(static_cast<const float*>(base) + index);
    const Words2 words = *reinterpret_cast<const Words2*>(static_cast<const u16*>(base) + index);
    const u32 pairs[2] = {words.x, words.y};
    float values[4];
    NoMemory none;
    Decoder<KIND == 1 ? CODEC_BF16 : CODEC_FP16>::decode4(pairs, values, none);
    return {values[0], values[1], values[2], values[3]};
}

template <int KIND>
__device__ __forceinline__ u32 pack_two(float low, float high) {
    if (KIND == 1) return float_to_bfloat(low) | u32(float_to_bfloat(high)) << 16;
    return float_to_half(low) | u32(float_to_half(high)) << 16;
}

template <int KIND>
__device__ __forceinline__ void store_four(void* base, i64 index, const Float4& four) {
    if (KIND == 0)
        *reinterpret_cast<Float4*>(static_cast<float*>(base) + index) = four;
    else
        *reinterpret_cast<Words2*>(static_cast<u16*>(base) + index) = {pack_two<KIND>(four.x, four.y),
                                                                       pack_two<KIND>(four.z, four.w)};
}

// tanh from one exponential: (1 - e) / (1 + e) with e = exp(-2 |x|), and the sign of x. NaN stays NaN.
#pragma once
#include "device.h"

// `turn` is -2 log2(e) |x|.
__device__ __forceinline__ float tanh_of(float turn, float sign) {
    const float e = exp2_fast(turn), size = div_rn(add_rn(1.0f, -e), add_rn(1.0f, e));
    return bits_float(float_bits(size) | (float_bits(sign) & 0x80000000u));
}

__device__ __forceinline__ float magnitude(float x) { return bits_float(float_bits(x) & 0x7fffffffu); }

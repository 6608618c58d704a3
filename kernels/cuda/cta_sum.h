// The sum of a value over the 256 threads of a CTA. Reads nothing but its arguments.
#pragma once
#include "device.h"

#define THREADS 256
#define WARPS (THREADS / 32)

// All threads get it. `buffer` (WARPS floats of shared memory) may be used again after a barrier.
__device__ __forceinline__ float sum_of_cta(float value, float* buffer) {
    DP_UNROLL
    for (int mask = 1; mask < 32; mask *= 2) value = add_rn(value, shuffle_xor(value, mask));
    if (threadIdx.x % 32 == 0) buffer[threadIdx.x / 32] = value;
    __syncthreads();
    value = buffer[0];
    DP_UNROLL
    for (int warp = 1; warp < WARPS; ++warp) value = add_rn(value, buffer[warp]);
    return value;
}

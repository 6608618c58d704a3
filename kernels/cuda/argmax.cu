// The id of the highest logit of a row, the lowest of equal ones; -1 where one is NaN or +inf, or all are -inf.
//
// Grid (rows), 1024 threads.
#include "device.h"

#define THREADS 1024
#define WARPS (THREADS / 32)

// The best so far. A logit that is NaN or +inf counts as +inf, so that it wins and shows at the end.
struct Best {
    float logit;
    int id;
};

__device__ __forceinline__ Best better(const Best& a, const Best& b) {
    return b.logit > a.logit || (b.logit == a.logit && b.id < a.id) ? b : a;
}

__device__ __forceinline__ Best best_of_warp(Best best) {
    DP_UNROLL
    for (int mask = 1; mask < 32; mask *= 2) {
        const float logit = shuffle_xor(best.logit, mask), id = shuffle_xor(bits_float(u32(best.id)), mask);
        best = better(best, {logit, int(float_bits(id))});
    }
    return best;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    KERNEL_NAME(int* __restrict__ ids,              // [rows]
                const float* __restrict__ logits,   // [rows, stride]
                int stride, int num_valid) {        // only the first `num_valid` of a row are looked at
    DP_SHARED(shared);
    Best* const bests = reinterpret_cast<Best*>(shared);
    const float infinity = bits_float(0x7f800000u);
    const float* const row = logits + i64(blockIdx.x) * stride;
    Best best = {-infinity, 0x7fffffff};
#pragma unroll 4
    for (int id = threadIdx.x; id < num_valid; id += THREADS) {
        const float logit = row[id];
        const bool countable = logit < infinity;
        if (!countable || logit > best.logit) best = {countable ? logit : infinity, id};
    }
    best = best_of_warp(best);
    if (threadIdx.x % 32 == 0) bests[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    best = best_of_warp(bests[threadIdx.x]);
    if (threadIdx.x == 0) ids[blockIdx.x] = best.logit > -infinity && best.logit < infinity ? best.id : -1;
}

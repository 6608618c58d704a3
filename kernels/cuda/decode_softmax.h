// The online softmax of paged_decode.cu, over chunks of scores in shared memory. Reads its macros.
#pragma once
#include "decode_tiles.h"
#include "tanh.h"

// Combines one value of every thread with those of the threads of the same head. All threads get the result.
template <bool MAXIMUM>
__device__ __forceinline__ float reduce_by_head(float value, float* buffer) {
    DP_UNROLL
    for (int mask = GROUP_PADDED; mask < 32; mask *= 2) {
        const float other = shuffle_xor(value, mask);
        value = MAXIMUM ? max_f(value, other) : add_rn(value, other);
    }
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane < GROUP_PADDED) buffer[warp * GROUP_PADDED + lane] = value;
    __syncthreads();
    value = buffer[threadIdx.x % GROUP_PADDED];
    DP_UNROLL
    for (int other = 1; other < WARPS; ++other) {
        const float theirs = buffer[other * GROUP_PADDED + threadIdx.x % GROUP_PADDED];
        value = MAXIMUM ? max_f(value, theirs) : add_rn(value, theirs);
    }
    __syncthreads();
    return value;
}

// The softmax of one head so far: the largest score (base 2), the sum of probabilities relative to it.
struct Softmax {
    float largest, sum;
};

// cap * tanh(score / cap), where the score is times log2(e).
__device__ __forceinline__ float capped_score(float score, float cap) {
    return mul_rn(tanh_of(mul_rn(div_rn(magnitude(score), cap), -2.0f), score), mul_rn(cap, LOG2_E));
}

// Scores of a chunk become probabilities, times the V scale, in place; past `tokens` zero is selected. `rescale` gets what earlier
// sums must be multiplied with. Thread = head, and every (THREADS / GROUP_PADDED)-th token.
__device__ __forceinline__ void soften(float* scores, const u16* v_scales, int tokens, float cap, float* buffer, float* rescale,
                                       Softmax& softmax) {
    constexpr int STEP = THREADS / GROUP_PADDED;
    const int head = threadIdx.x % GROUP_PADDED, first = threadIdx.x / GROUP_PADDED;
    const bool is_head = head < GROUP;
    float largest = is_head ? softmax.largest : 0.0f, sum = 0.0f;
    for (int token = first; token < tokens; token += STEP) {
        if (!is_head) continue;
        float* const place = scores + token * GROUP_PADDED + head;
        if (SOFT_CAP) *place = capped_score(*place, cap);
        largest = max_f(largest, *place);
    }
    largest = reduce_by_head<true>(largest, buffer);
    for (int token = first; token < CHUNK; token += STEP) {
        float* const place = scores + token * GROUP_PADDED + head;
        const bool real = is_head && token < tokens;
        const float probability = real ? exp2_fast(*place - largest) : 0.0f;
        sum = add_rn(sum, probability);
        *place = V::SCALED && real ? probability * half_to_float(v_scales[token]) : probability;
    }
    const float factor = exp2_fast(softmax.largest - largest);
    if (threadIdx.x < GROUP_PADDED) rescale[head] = factor;
    softmax.sum = fma_rn(softmax.sum, factor, reduce_by_head<false>(sum, buffer));
    softmax.largest = largest;
}

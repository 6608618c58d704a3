// Merges the partitions of a row's attention in fp32.
//
// Grid (query heads, rows), 128 threads. Macros: HEAD_DIM, OUT_KIND (0 fp32, 1 bf16, 2 fp16), MAX_PARTITIONS, PREFILL
// (0: partitions of paged_decode.cu, 1: of paged_prefill.cu).
#include "codecs.h"
#include "partitions.h"
#include "prefill_partitions.h"

#define THREADS 128
#define WARPS (THREADS / 32)
#define ROW_THREADS (HEAD_DIM / 4)
#define AT_ONCE (THREADS / ROW_THREADS)

// All threads get the largest value, or the sum, of all threads' values.
template <bool MAXIMUM>
__device__ __forceinline__ float reduce(float value, float* buffer) {
    DP_UNROLL
    for (int mask = 1; mask < 32; mask *= 2) {
        const float other = shuffle_xor(value, mask);
        value = MAXIMUM ? max_f(value, other) : add_rn(value, other);
    }
    if (threadIdx.x % 32 == 0) buffer[threadIdx.x / 32] = value;
    __syncthreads();
    value = buffer[0];
    DP_UNROLL
    for (int warp = 1; warp < WARPS; ++warp)
        value = MAXIMUM ? max_f(value, buffer[warp]) : add_rn(value, buffer[warp]);
    __syncthreads();
    return value;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    KERNEL_NAME(void* __restrict__ out,                     // [rows, query heads, HEAD_DIM]
                const float* __restrict__ partial_sums,     // [rows, query heads, max_partitions, HEAD_DIM]
                const float* __restrict__ partial_softmax,  // [rows, query heads, max_partitions, 2]
                const int* __restrict__ positions, int window, int max_partitions) {
    DP_SHARED(shared);
    float* const weights = reinterpret_cast<float*>(shared);
    float* const buffer = weights + MAX_PARTITIONS;
    float* const gathered = buffer + WARPS;
    const int thread = threadIdx.x;
    const i64 head = i64(blockIdx.y) * gridDim.x + blockIdx.x;
    const int position = positions[blockIdx.y], visible = visible_tokens(position, window);
    if (visible == 0) {  // a row of padding
        for (int dim = thread; dim < HEAD_DIM; dim += THREADS)
            store_activation<OUT_KIND>(out, head * HEAD_DIM + dim, 0.0f);
        return;
    }
    int skipped = 0, partitions;  // those before the window, and the number of the others
    if (PREFILL) {
        const int size = prefill_partition_tokens(position);
        skipped = first_visible(position, window) / size;
        partitions = position / size + 1 - skipped;
    } else {
        const int size = partition_tokens(visible);
        partitions = (visible + size - 1) / size;
    }
    const float* const softmax = partial_softmax + (head * max_partitions + skipped) * 2;

    float maximum = bits_float(0xff800000u), sum = 0.0f;
    for (int p = thread; p < partitions; p += THREADS) maximum = max_f(maximum, softmax[2 * p]);
    maximum = reduce<true>(maximum, buffer);
    for (int p = thread; p < partitions; p += THREADS) {
        weights[p] = exp2_fast(softmax[2 * p] - maximum);
        sum = fma_rn(softmax[2 * p + 1], weights[p], sum);
    }
    sum = reduce<false>(sum, buffer);

    float mixed[4] = {};
    if (thread < ROW_THREADS * AT_ONCE) {
        const float* const column = partial_sums + (head * max_partitions + skipped) * HEAD_DIM + thread % ROW_THREADS * 4;
#pragma unroll 4
        for (int p = thread / ROW_THREADS; p < partitions; p += AT_ONCE) {
            const Float4 four = *reinterpret_cast<const Float4*>(column + i64(p) * HEAD_DIM);
            mixed[0] = fma_rn(weights[p], four.x, mixed[0]);
            mixed[1] = fma_rn(weights[p], four.y, mixed[1]);
            mixed[2] = fma_rn(weights[p], four.z, mixed[2]);
            mixed[3] = fma_rn(weights[p], four.w, mixed[3]);
        }
        DP_UNROLL
        for (int i = 0; i < 4; ++i) gathered[thread * 4 + i] = mixed[i];
    }
    __syncthreads();
    for (int dim = thread; dim < HEAD_DIM; dim += THREADS) {
        float total = gathered[dim];
        DP_UNROLL
        for (int other = 1; other < AT_ONCE; ++other) total = add_rn(total, gathered[other * HEAD_DIM + dim]);
        store_activation<OUT_KIND>(out, head * HEAD_DIM + dim, div_rn(total, sum));
    }
}

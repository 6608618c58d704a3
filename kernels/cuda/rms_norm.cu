// Root mean square norm of fp32 rows, after adding to them if ADD: residual += delta, then out = residual / rms *
// weight. A row's sum of squares runs in an order that the width alone decides.
//
// Grid (rows), 256 threads. Macros: ADD (0, 1), ACTIVATION of delta and out (0 fp32, 1 bf16, 2 fp16), FOURS: how many
// times four elements a thread has.
#include "fours.h"

#define THREADS 256
#define WARPS (THREADS / 32)

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

extern "C" __global__ void __launch_bounds__(THREADS)
    KERNEL_NAME(void* __restrict__ out,           // [rows, width]
                float* __restrict__ residual,     // [rows, width]; written if ADD
                const void* __restrict__ delta,   // [rows, width]; read if ADD
                const float* __restrict__ weight, // [width]
                int width, float eps) {
    DP_SHARED(shared);
    const i64 row = i64(blockIdx.x) * width;
    Float4 kept[FOURS];
    float squares = 0.0f;
    DP_UNROLL
    for (int i = 0; i < FOURS; ++i) {
        const int column = (i * THREADS + int(threadIdx.x)) * 4;
        if (column >= width) continue;
        Float4 four = load_four<0>(residual, row + column);
        if (ADD) {
            const Float4 more = load_four<ACTIVATION>(delta, row + column);
            four = {add_rn(four.x, more.x), add_rn(four.y, more.y), add_rn(four.z, more.z), add_rn(four.w, more.w)};
            store_four<0>(residual, row + column, four);
        }
        squares = fma_rn(four.x, four.x, squares);
        squares = fma_rn(four.y, four.y, squares);
        squares = fma_rn(four.z, four.z, squares);
        squares = fma_rn(four.w, four.w, squares);
        kept[i] = four;
    }
    const float mean = div_rn(sum_of_cta(squares, reinterpret_cast<float*>(shared)), float(width));
    const float inverse = div_rn(1.0f, sqrt_rn(add_rn(mean, eps)));
    DP_UNROLL
    for (int i = 0; i < FOURS; ++i) {
        const int column = (i * THREADS + int(threadIdx.x)) * 4;
        if (column >= width) continue;
        const Float4 w = load_four<0>(weight, column), four = kept[i];
        store_four<ACTIVATION>(out, row + column,
                         {mul_rn(mul_rn(four.x, inverse), w.x), mul_rn(mul_rn(four.y, inverse), w.y),
                          mul_rn(mul_rn(four.z, inverse), w.z), mul_rn(mul_rn(four.w, inverse), w.w)});
    }
}

// Root mean square norm of fp32 rows, after adding to them if ADD: residual += delta, then out = residual / rms *
// weight. With NORM_DELTA what is added is delta / rms * delta_weight; without NORM_OUT out is the residual as it is.
// A row's sums of squares run in an order that the width alone decides.
//
// Grid (rows), 256 threads. Macros: ADD, NORM_DELTA, NORM_OUT (0, 1), ACTIVATION of delta and out (0 fp32, 1 bf16, 2 fp16),
// FOURS: how many times four elements a thread has.
#include "cta_sum.h"
#include "fours.h"

__device__ __forceinline__ float squares_of(const Float4& four, float sum) {
    sum = fma_rn(four.x, four.x, sum);
    sum = fma_rn(four.y, four.y, sum);
    sum = fma_rn(four.z, four.z, sum);
    return fma_rn(four.w, four.w, sum);
}

__device__ __forceinline__ float inverse_rms(float squares, int width, float eps, float* buffer) {
    const float mean = div_rn(sum_of_cta(squares, buffer), float(width));
    return div_rn(1.0f, sqrt_rn(add_rn(mean, eps)));
}

__device__ __forceinline__ Float4 scaled(const Float4& four, float inverse, const Float4& w) {
    return {mul_rn(mul_rn(four.x, inverse), w.x), mul_rn(mul_rn(four.y, inverse), w.y),
            mul_rn(mul_rn(four.z, inverse), w.z), mul_rn(mul_rn(four.w, inverse), w.w)};
}

extern "C" __global__ void __launch_bounds__(THREADS)
    KERNEL_NAME(void* __restrict__ out,           // [rows, width]
                float* __restrict__ residual,     // [rows, width]; written if ADD
                const void* __restrict__ delta,   // [rows, width]; read if ADD
                const float* __restrict__ weight, // [width]; read if NORM_OUT
                const float* __restrict__ delta_weight,  // [width]; read if NORM_DELTA
                int width, float eps) {
    DP_SHARED(shared);
    float* const buffer = reinterpret_cast<float*>(shared);
    const i64 row = i64(blockIdx.x) * width;
    Float4 kept[FOURS];
    float inverse_delta = 0.0f, squares = 0.0f;
    if (NORM_DELTA) {
        DP_UNROLL
        for (int i = 0; i < FOURS; ++i) {
            const int column = (i * THREADS + int(threadIdx.x)) * 4;
            if (column < width) squares = squares_of(load_four<ACTIVATION>(delta, row + column), squares);
        }
        inverse_delta = inverse_rms(squares, width, eps, buffer);
        squares = 0.0f;
        __syncthreads();
    }
    DP_UNROLL
    for (int i = 0; i < FOURS; ++i) {
        const int column = (i * THREADS + int(threadIdx.x)) * 4;
        if (column >= width) continue;
        Float4 four = load_four<0>(residual, row + column);
        if (ADD) {
            Float4 more = load_four<ACTIVATION>(delta, row + column);
            if (NORM_DELTA) more = scaled(more, inverse_delta, load_four<0>(delta_weight, column));
            four = {add_rn(four.x, more.x), add_rn(four.y, more.y), add_rn(four.z, more.z), add_rn(four.w, more.w)};
            store_four<0>(residual, row + column, four);
        }
        if (NORM_OUT)
            squares = squares_of(four, squares);
        else
            store_four<ACTIVATION>(out, row + column, four);
        kept[i] = four;
    }
    if (!NORM_OUT) return;
    const float inverse = inverse_rms(squares, width, eps, buffer);
    DP_UNROLL
    for (int i = 0; i < FOURS; ++i) {
        const int column = (i * THREADS + int(threadIdx.x)) * 4;
        if (column >= width) continue;
        store_four<ACTIVATION>(out, row + column, scaled(kept[i], inverse, load_four<0>(weight, column)));
    }
}

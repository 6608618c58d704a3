// Root mean square norms in place of the first columns of each row, which are its queries, and of the next, which are
// its keys: each norm is one of the whole projection.
//
// Grid (2, rows), 256 threads. Macro: ACTIVATION (0 fp32, 1 bf16, 2 fp16).
#include "cta_sum.h"
#include "fours.h"

extern "C" __global__ void __launch_bounds__(THREADS)
    KERNEL_NAME(void* __restrict__ qkv,  // [rows, stride]
                const float* __restrict__ q_weight, const float* __restrict__ k_weight,  // [q_width], [k_width]
                int q_width, int k_width, int stride, float eps) {
    DP_SHARED(shared);
    const bool is_query = blockIdx.x == 0;
    const float* const weight = is_query ? q_weight : k_weight;
    const int width = is_query ? q_width : k_width;
    const i64 start = i64(blockIdx.y) * stride + (is_query ? 0 : q_width);
    float squares = 0.0f;
    for (int column = int(threadIdx.x) * 4; column < width; column += THREADS * 4) {
        const Float4 four = load_four<ACTIVATION>(qkv, start + column);
        squares = fma_rn(four.x, four.x, squares);
        squares = fma_rn(four.y, four.y, squares);
        squares = fma_rn(four.z, four.z, squares);
        squares = fma_rn(four.w, four.w, squares);
    }
    const float mean = div_rn(sum_of_cta(squares, reinterpret_cast<float*>(shared)), float(width));
    const float inverse = div_rn(1.0f, sqrt_rn(add_rn(mean, eps)));
    for (int column = int(threadIdx.x) * 4; column < width; column += THREADS * 4) {
        const Float4 four = load_four<ACTIVATION>(qkv, start + column), w = load_four<0>(weight, column);
        store_four<ACTIVATION>(qkv, start + column,
                               {mul_rn(mul_rn(four.x, inverse), w.x), mul_rn(mul_rn(four.y, inverse), w.y),
                                mul_rn(mul_rn(four.z, inverse), w.z), mul_rn(mul_rn(four.w, inverse), w.w)});
    }
}

// y = x W^T + bias for 1 to 8 N_TILES rows of x; weights W of 4 or 8 bits with scales, or of 16 bits.
//
// Grid (output tiles / M_TILES), 32 WARPS threads. The warps of a CTA take the input tiles in turn; each multiplies the
// codes, exact in 16 bits, with the rows on the tensor cores, and adds up scale * sum(code * x) + minimum * sum(x) of
// each group in fp32. The last step adds the warps' sums in their order. So an element of y depends on its own row of x
// and on WARPS alone, whatever the number of rows.
//
// Macros: those of weight_tiles.h, ACTIVATION (of x and of 16-bit weights; 1 bf16, 2 fp16), OUT_KIND (0 fp32, 1 bf16,
// 2 fp16), HAS_BIAS, and of the plan in gemv_plan.py WARPS, M_TILES, N_TILES, CTAS_PER_SM.
#include "weight_tiles.h"

#define OUTPUTS (TILE_OUTPUTS * M_TILES)
#define ROWS (8 * N_TILES)
#define STEPS (TILE_STEPS / Scales::GROUPS)
#define ROW_STRIDE (OUTPUTS + 4)  // the lanes of a warp then write to banks of their own

typedef float Sums[M_TILES][N_TILES][4];

// What a warp needs of one input tile, as a lane holds it.
struct Step {
    Codes codes[M_TILES];
    Scales scales[M_TILES];
    Words4 x[N_TILES][2];
};

// Rows and inputs that x does not have are zeros, and are not read; a tile that the weights do not have is a repetition
// of the last one.
__device__ __forceinline__ void load_step(const Weights& weights, const u16* x, int rows, int inputs, int tile,
                                          Step& step) {
    const int last = weights.input_tiles - 1, weight_tile = tile < last ? tile : last;
    DP_UNROLL
    for (int m = 0; m < M_TILES; ++m) {
        step.codes[m] = weights.load_codes(m, weight_tile);
        if (WEIGHT_BITS < 16) step.scales[m] = weights.load_scales(m, weight_tile);
    }
    DP_UNROLL
    for (int i = 0; i < 2 * N_TILES; ++i) {
        const int row = i / 2 * 8 + LANE / 4, input = tile * TILE_INPUTS + i % 2 * 32 + LANE % 4 * 8;
        step.x[i / 2][i % 2] = {0, 0, 0, 0};
        if (row < rows && input < inputs)
            step.x[i / 2][i % 2] = *reinterpret_cast<const Words4*>(x + row * inputs + input);
    }
}

// The right operand of step s of a tile, for one tile of rows.
__device__ __forceinline__ u32 x_word(const Step& step, int n, int s, int i) {
    return word_of(step.x[n][s / 2], s % 2 * 2 + i);
}

// The sums of the rows 2t and 2t + 1 over one group. Here x is the left operand: two steps fill its 16 rows.
__device__ __forceinline__ void sum_x(const Step& step, int n, int group, float* sums) {
    const u32 ones[2] = {Pairs<ACTIVATION>::ONES, Pairs<ACTIVATION>::ONES};
    float products[4] = {};
    DP_UNROLL
    for (int s = group * STEPS; s < (group + 1) * STEPS; s += 2) {
        const u32 x[4] = {x_word(step, n, s, 0), x_word(step, n, s + 1, 0), x_word(step, n, s, 1),
                          x_word(step, n, s + 1, 1)};
        multiply_tile<ACTIVATION>(products, x, ones);
    }
    const float sum = add_rn(products[0], products[2]);
    sums[0] = shuffle_from(sum, LANE % 4 * 8);
    sums[1] = shuffle_from(sum, LANE % 4 * 8 + 4);
}

// Adds the products of one group of inputs of a tile.
__device__ __forceinline__ void add_group(const Step& step, int group, Sums& totals) {
    Sums sums = {};
    float x_sums[N_TILES][2];
    DP_UNROLL
    for (int n = 0; n < N_TILES && MINIMA; ++n) sum_x(step, n, group, x_sums[n]);
    DP_UNROLL
    for (int i = 0; i < STEPS * M_TILES; ++i) {
        const int s = group * STEPS + i / M_TILES, m = i % M_TILES;
        u32 codes[4];
        unpack_step<ACTIVATION>(step.codes[m], s, codes);
        DP_UNROLL
        for (int n = 0; n < N_TILES; ++n) {
            const u32 x[2] = {x_word(step, n, s, 0), x_word(step, n, s, 1)};
            multiply_tile<ACTIVATION>(sums[m][n], codes, x);
        }
    }
    DP_UNROLL
    for (int i = 0; i < M_TILES * N_TILES * 4; ++i) {
        const int m = i / (4 * N_TILES), n = i / 4 % N_TILES, upper = i % 4 / 2;
        float& total = totals[m][n][i % 4];
        const float scale = WEIGHT_BITS < 16 ? step.scales[m].scale(group, upper) : 1.0f;
        total = fma_rn(scale, sums[m][n][i % 4], total);
        if (MINIMA) total = fma_rn(step.scales[m].minimum(group, upper), x_sums[n][i % 2], total);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, CTAS_PER_SM)
    KERNEL_NAME(void* __restrict__ y,             // [rows, outputs]
                const u16* __restrict__ x,        // [rows, inputs]
                const Words4* __restrict__ codes, const u32* __restrict__ scales,
                const float* __restrict__ bias,   // [outputs]; read if HAS_BIAS
                int rows, int inputs, int outputs, float unit) {  // `unit` is what scales and minima are counted in
    DP_SHARED(shared);
    float* const partial = reinterpret_cast<float*>(shared);  // [WARPS, ROWS, ROW_STRIDE]
    const int warp = threadIdx.x / 32;
    const Weights weights(codes, scales, inputs, blockIdx.x * M_TILES);

    // The same number of rounds for all warps, so that the compiler sees them go together.
    const int rounds = (weights.input_tiles + WARPS - 1) / WARPS;
    Sums totals = {};
    Step step;
    load_step(weights, x, rows, inputs, warp, step);
#pragma unroll 2
    for (int round = 0; round < rounds; ++round) {
        Step next;
        if (round + 1 < rounds) load_step(weights, x, rows, inputs, (round + 1) * WARPS + warp, next);
        DP_UNROLL
        for (int group = 0; group < Scales::GROUPS; ++group) add_group(step, group, totals);
        step = next;
    }

    DP_UNROLL
    for (int m = 0; m < M_TILES; ++m) {
        DP_UNROLL
        for (int i = 0; i < 4 * N_TILES; ++i) {
            const int row = i / 4 * 8 + LANE % 4 * 2 + i % 2;
            const int output = m * TILE_OUTPUTS + LANE / 4 + i % 4 / 2 * 8;
            partial[(warp * ROWS + row) * ROW_STRIDE + output] = totals[m][i / 4][i % 4];
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < rows * OUTPUTS; i += 32 * WARPS) {
        const int row = i / OUTPUTS, output = int(blockIdx.x) * OUTPUTS + i % OUTPUTS;
        if (output >= outputs) continue;
        float sum = 0.0f;
        DP_UNROLL
        for (int w = 0; w < WARPS; ++w) sum = add_rn(sum, partial[(w * ROWS + row) * ROW_STRIDE + i % OUTPUTS]);
        sum = mul_rn(sum, unit);
        store_activation<OUT_KIND>(y, i64(row) * outputs + output, HAS_BIAS ? add_rn(sum, bias[output]) : sum);
    }
}

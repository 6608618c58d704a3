// 4-bit weights to 16 bits: [outputs, inputs], for a matmul of many rows.
//
// Grid (ceil(input tiles / 4), output tiles), 128 threads: a warp has one tile. Macros: those of weight_tiles.h
// (WEIGHT_BITS 4), and ACTIVATION (of the result).
#include "weight_tiles.h"

// Two weights of one output, in a word.
__device__ __forceinline__ u32 weight_pair(u32 codes, int low, float scale, float minimum) {
    u32 pair = 0;
    DP_UNROLL
    for (int i = 0; i < 2; ++i) {
        // the code as the last bits of the float 2^23 + code
        const float code = bits_float(0x4b000000u | ((codes >> (4 * (low + 4 * i))) & 15u)) - 8388608.0f;
        const float weight = fma_rn(scale, code, minimum);
        pair |= u32(ACTIVATION == 1 ? float_to_bfloat(weight) : float_to_half(weight)) << (16 * i);
    }
    return pair;
}

extern "C" __global__ void __launch_bounds__(128)
    KERNEL_NAME(u16* __restrict__ weights,  // [outputs, inputs] from output tile `first_tile` on
                const Words4* __restrict__ codes, const u32* __restrict__ scales, int inputs, int outputs,
                int first_tile, float unit) {
    const int output_tile = first_tile + blockIdx.y, input_tile = blockIdx.x * 4 + threadIdx.x / 32;
    const int input = input_tile * TILE_INPUTS + LANE % 4 * 8;
    const Weights tiles(codes, scales, inputs, output_tile);
    if (input_tile >= tiles.input_tiles) return;
    const Codes words = tiles.load_codes(0, input_tile);
    const Scales groups = tiles.load_scales(0, input_tile);
    DP_UNROLL
    for (int i = 0; i < 4; ++i) {
        const int half = i / 2, upper = i % 2, group = half % Scales::GROUPS;
        const int output = output_tile * TILE_OUTPUTS + LANE / 4 + 8 * upper;
        if (output >= outputs || input + 32 * half >= inputs) continue;
        const float scale = groups.scale(group, upper) * unit;
        const float minimum = MINIMA ? groups.minimum(group, upper) * unit : -8.0f * scale;
        const i64 place = i64(output - first_tile * TILE_OUTPUTS) * inputs + input + 32 * half;
        const u32 low = words.word(2 * half), high = words.word(2 * half + 1);
        *reinterpret_cast<Words4*>(weights + place) = {
            weight_pair(low, upper, scale, minimum), weight_pair(low, upper + 2, scale, minimum),
            weight_pair(high, upper, scale, minimum), weight_pair(high, upper + 2, scale, minimum)};
    }
}

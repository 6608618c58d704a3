// out = silu(gate) * up, or gelu(gate) * up with the tanh form of gelu; in fp32 between loading and storing.
//
// Grid (ceil(width / 1024), rows), 256 threads. Macros: ACTIVATION of all (0 fp32, 1 bf16, 2 fp16), GELU (0, 1).
#include "fours.h"

#define LOG2_E 1.4426950408889634f

// What the sigmoid is taken of. gelu's (1 + tanh(u)) / 2 is the sigmoid of 2 u, u = sqrt(2 / pi) (x + 0.044715 x^3).
__device__ __forceinline__ float turn(float gate) {
    if (!GELU) return gate;
    return mul_rn(mul_rn(gate, 1.5957691216057308f), fma_rn(mul_rn(gate, gate), 0.044715f, 1.0f));
}

__device__ __forceinline__ float gated(float gate, float up) {
    return mul_rn(div_rn(gate, add_rn(1.0f, exp2_fast(mul_rn(turn(gate), -LOG2_E)))), up);
}

extern "C" __global__ void __launch_bounds__(256)
    KERNEL_NAME(void* __restrict__ out,            // [rows, width]
                const void* __restrict__ gate_up,  // [rows, 2 width], the gate first
                int width) {
    const int column = int(blockIdx.x * 256 + threadIdx.x) * 4;
    if (column >= width) return;
    const i64 row = blockIdx.y, start = row * 2 * width + column;
    const Float4 gate = load_four<ACTIVATION>(gate_up, start), up = load_four<ACTIVATION>(gate_up, start + width);
    store_four<ACTIVATION>(out, row * width + column, {gated(gate.x, up.x), gated(gate.y, up.y), gated(gate.z, up.z),
                                                 gated(gate.w, up.w)});
}

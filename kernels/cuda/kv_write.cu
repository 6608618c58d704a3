// The projections of new tokens: queries are normalised and rotated into fp32, keys and values are normalised, rotated,
// clamped, encoded and put into their slots. One warp for each head of each row; decode rows and prefill rows alike.
//
// Grid (ceil(heads / 4), rows), 128 threads. Macros: HEAD_DIM, BLOCK_SIZE, K_CODEC, V_CODEC, IN_KIND (0 fp32, 1 bf16,
// 2 fp16), QK_NORM (0, 1), ROTATE (0: nothing is rotated).
#include "codecs.h"

#define HALF_DIM (HEAD_DIM / 2)
#define PAIRS ((HALF_DIM + 31) / 32)

// A head, spread over a warp: lane l has the pairs of dimensions (l + 32 j, l + 32 j + HALF_DIM).
struct Head {
    float low[PAIRS], high[PAIRS];
};

__device__ __forceinline__ bool has_pair(int j) { return int(threadIdx.x % 32) + 32 * j < HALF_DIM; }
__device__ __forceinline__ int low_dim(int j) { return threadIdx.x % 32 + 32 * j; }

__device__ __forceinline__ Head load_head(const void* qkv, i64 start) {
    Head head;
    DP_UNROLL
    for (int j = 0; j < PAIRS; ++j) {
        head.low[j] = has_pair(j) ? load_activation<IN_KIND>(qkv, start + low_dim(j)) : 0.0f;
        head.high[j] = has_pair(j) ? load_activation<IN_KIND>(qkv, start + low_dim(j) + HALF_DIM) : 0.0f;
    }
    return head;
}

// Root mean square norm, as Qwen3 has it on each query and key head.
__device__ __forceinline__ void normalise(Head& head, const float* weight, float eps) {
    float squares = 0.0f;
    DP_UNROLL
    for (int j = 0; j < PAIRS; ++j)
        squares = add_rn(squares, add_rn(mul_rn(head.low[j], head.low[j]), mul_rn(head.high[j], head.high[j])));
    DP_UNROLL
    for (int mask = 1; mask < 32; mask *= 2) squares = add_rn(squares, shuffle_xor(squares, mask));
    const float inverse = div_rn(1.0f, sqrt_rn(add_rn(div_rn(squares, float(HEAD_DIM)), eps)));
    DP_UNROLL
    for (int j = 0; j < PAIRS; ++j) {
        if (!has_pair(j)) continue;
        head.low[j] = mul_rn(mul_rn(head.low[j], inverse), weight[low_dim(j)]);
        head.high[j] = mul_rn(mul_rn(head.high[j], inverse), weight[low_dim(j) + HALF_DIM]);
    }
}

// RoPE in the half-split form. Not fused, so that it rounds as plain torch does.
__device__ __forceinline__ void rotate(Head& head, const float* cos, const float* sin) {
    DP_UNROLL
    for (int j = 0; j < PAIRS; ++j) {
        if (!has_pair(j)) continue;
        const float c = cos[low_dim(j)], s = sin[low_dim(j)], first = head.low[j], second = head.high[j];
        head.low[j] = add_rn(mul_rn(first, c), -mul_rn(second, s));
        head.high[j] = add_rn(mul_rn(second, c), mul_rn(first, s));
    }
}

struct Tally {
    int saturated, nonfinite;
};

// What is not finite becomes 0, what is too large becomes the largest that the codec holds.
__device__ __forceinline__ float storable(float x, float limit, Tally& tally) {
    const bool finite = (float_bits(x) & 0x7f800000u) != 0x7f800000u;
    tally.nonfinite += !finite;
    const float kept = finite ? x : 0.0f;
    const bool saturated = kept > limit || kept < -limit;
    tally.saturated += saturated;
    return saturated ? (kept > 0.0f ? limit : -limit) : kept;
}

template <int CODEC>
__device__ __forceinline__ Tally store_head(Head& head, u8* codes, u8* scales, int slot) {
    Tally tally = {0, 0};
    float largest = 0.0f, scale = 0.0f;
    DP_UNROLL
    for (int j = 0; j < PAIRS; ++j) {
        head.low[j] = storable(head.low[j], Decoder<CODEC>::LIMIT, tally);
        head.high[j] = storable(head.high[j], Decoder<CODEC>::LIMIT, tally);
        largest = max_f(largest, max_f(max_f(head.low[j], -head.low[j]), max_f(head.high[j], -head.high[j])));
    }
    if constexpr (Decoder<CODEC>::SCALED) {
        DP_UNROLL
        for (int mask = 1; mask < 32; mask *= 2) largest = max_f(largest, shuffle_xor(largest, mask));
        const u16 stored = float_to_half(min_f(div_rn(largest, LARGEST_CODE), LARGEST_SCALE));
        if (threadIdx.x % 32 == 0) reinterpret_cast<u16*>(scales)[slot] = stored;
        scale = half_to_float(stored);
    }
    u8* const row = codes + i64(slot) * HEAD_DIM * Decoder<CODEC>::ITEM_BYTES;
    DP_UNROLL
    for (int j = 0; j < PAIRS; ++j) {
        if (!has_pair(j)) continue;
        encode<CODEC>(head.low[j], scale, row, low_dim(j));
        encode<CODEC>(head.high[j], scale, row, low_dim(j) + HALF_DIM);
    }
    return tally;
}

extern "C" __global__ void __launch_bounds__(128)
    KERNEL_NAME(u8* __restrict__ pool,            // the slots of these rows are written by this launch alone
                float* __restrict__ queries,      // [rows, query heads, HEAD_DIM]
                int* __restrict__ counters,       // [2]: saturated, non-finite elements; added to
                u8* __restrict__ nonfinite_rows,  // [rows]; set, never cleared
                const void* __restrict__ qkv,     // [rows, query heads + 2 KV heads, HEAD_DIM]
                const float* __restrict__ cos, const float* __restrict__ sin,  // [positions, HALF_DIM]; read if ROTATE
                const float* __restrict__ q_weight, const float* __restrict__ k_weight,  // [HEAD_DIM]; read if QK_NORM
                const int* __restrict__ block_tables, const int* __restrict__ positions,
                const int* __restrict__ row_seq, int max_blocks, int block_bytes, int k_offset, int v_offset,
                int k_scale_offset, int v_scale_offset, int query_heads, int kv_heads, float eps) {
    const int heads = query_heads + 2 * kv_heads;
    const int index = blockIdx.x * 4 + threadIdx.x / 32, row = blockIdx.y;
    if (index >= heads) return;
    const bool is_query = index < query_heads, is_value = index >= query_heads + kv_heads;
    const int position = positions[row];
    if (position < 0) return;  // a row of padding

    Head head = load_head(qkv, (i64(row) * heads + index) * HEAD_DIM);
    if (QK_NORM && !is_value) normalise(head, is_query ? q_weight : k_weight, eps);
    if (ROTATE && !is_value) rotate(head, cos + i64(position) * HALF_DIM, sin + i64(position) * HALF_DIM);
    if (is_query) {
        float* const target = queries + (i64(row) * query_heads + index) * HEAD_DIM;
        DP_UNROLL
        for (int j = 0; j < PAIRS; ++j) {
            if (!has_pair(j)) continue;
            target[low_dim(j)] = head.low[j];
            target[low_dim(j) + HALF_DIM] = head.high[j];
        }
        return;
    }
    const i64 id = block_tables[i64(row_seq[row]) * max_blocks + position / BLOCK_SIZE];
    u8* const block = pool + id * block_bytes;
    const int kv_head = index - query_heads - (is_value ? kv_heads : 0);
    const int slot = kv_head * BLOCK_SIZE + position % BLOCK_SIZE;
    const Tally tally = is_value ? store_head<V_CODEC>(head, block + v_offset, block + v_scale_offset, slot)
                                 : store_head<K_CODEC>(head, block + k_offset, block + k_scale_offset, slot);
    if (tally.saturated) atomicAdd(counters, tally.saturated);
    if (tally.nonfinite) {
        atomicAdd(counters + 1, tally.nonfinite);
        nonfinite_rows[row] = 1;
    }
}

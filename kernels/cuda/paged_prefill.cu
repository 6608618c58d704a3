// Attention of a tile of neighbouring rows of one sequence over one partition of their context, for one KV head, on the
// tensor cores. Every K and V tile is read and decoded once for all of them.
//
// Grid (partitions, KV heads, tiles), 128 threads. The 64 rows of the tensor core's left operand are the query heads of
// the group of one row after another; a warp has 16. K and V come through shared memory as 16-bit floats, in tiles of
// TILE_TOKENS tokens at multiples of TILE_TOKENS. Scores and sums are fp32. A query is the sum of two 16-bit floats, so
// that scores are as good as those of fp32 queries; so is a probability where values are bf16.
//
// A tile in which a row sees nothing changes nothing of it, and no row touches another. So a row's sums depend on its
// own context alone, whatever tile it is in.
//
// Macros: HEAD_DIM, GROUP, BLOCK_SIZE, K_CODEC, V_CODEC, KEY_BIAS (0, 1: keys are stored without their bias, and
// RoPE(bias, position) is added here), SOFT_CAP (0, 1: scores s become cap * tanh(s / cap)), and of the plan in
// prefill_plan.py TILE_TOKENS, CTAS_PER_SM.
#include "prefill_partitions.h"
#include "prefill_tiles.h"

#define TILE_ROWS 64
#define LOG2_E 1.4426950408889634f
#define MINUS_INFINITY bits_float(0xff800000u)
// Probabilities are 2^15 times too large, as large as fp16 holds: small ones then keep their bits. The division by their
// sum takes it out again.
#define RAISED 15.0f

constexpr int DIM_STEPS = HEAD_DIM / 16, TOKEN_TILES = TILE_TOKENS / 8;
constexpr int K_KIND = Halves<K_CODEC>::KIND, V_KIND = Halves<V_CODEC>::KIND;
constexpr bool K_SCALED = Decoder<K_CODEC>::SCALED && !KEY_BIAS, V_SCALED = Decoder<V_CODEC>::SCALED;
constexpr int V_TERMS = V_KIND == 1 ? 2 : 1;
constexpr bool QUERIES_IN_REGISTERS = HEAD_DIM <= 128;

// Where things lie in shared memory, in bytes.
struct Layout {
    static constexpr int V = TILE_TOKENS * K_STRIDE * 4;
    static constexpr int K_REST = V + TILE_TOKENS * V_STRIDE * 4;
    static constexpr int K_SCALES = K_REST + KEY_BIAS * TILE_TOKENS * K_STRIDE * 4;  // float [TILE_TOKENS]
    static constexpr int V_SCALES = K_SCALES + TILE_TOKENS * 4;                      // float [TILE_TOKENS]
};

// The left operand of one step of 16 dimensions, twice: rounded, and what that left. Lane 4 g + t has the dimensions
// 4 t to 4 t + 3 of the rows g and g + 8.
struct QueryStep {
    u32 terms[2][4];
};

// The two rows of a lane.
struct LaneRows {
    const float* queries[2];
    i64 head[2];  // counted over all rows
    bool real[2];
    int position[2];

    __device__ __forceinline__ QueryStep step(int s, float factor) const {
        QueryStep loaded;
        DP_UNROLL
        for (int i = 0; i < 2; ++i) {
            Float4 q = {0.0f, 0.0f, 0.0f, 0.0f};
            if (real[i]) q = *reinterpret_cast<const Float4*>(queries[i] + 16 * s);
            split_pair<K_KIND>(q.x * factor, q.y * factor, loaded.terms[0][i], loaded.terms[1][i]);
            split_pair<K_KIND>(q.z * factor, q.w * factor, loaded.terms[0][i + 2], loaded.terms[1][i + 2]);
        }
        return loaded;
    }
};

__device__ __forceinline__ float over_row(float value, bool maximum) {
    DP_UNROLL
    for (int mask = 1; mask < 4; mask *= 2) {
        const float other = shuffle_xor(value, mask);
        value = maximum ? max_f(value, other) : add_rn(value, other);
    }
    return value;
}

// Adds the products of one step of dimensions to the scores of a tile.
__device__ __forceinline__ void score_step(const QueryStep& query, const u32* keys, const u32* rest, int s,
                                           float (*scores)[4]) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    DP_UNROLL
    for (int n = 0; n < TOKEN_TILES; ++n) {
        const int place = (8 * n + g) * K_STRIDE + 8 * s + 2 * t;
        const Words2 key = *reinterpret_cast<const Words2*>(keys + place);
        const u32 pair[2] = {key.x, key.y};
        multiply_tile<K_KIND>(scores[n], query.terms[0], pair);
        multiply_tile<K_KIND>(scores[n], query.terms[1], pair);
        if constexpr (KEY_BIAS) {
            const Words2 left = *reinterpret_cast<const Words2*>(rest + place);
            const u32 second[2] = {left.x, left.y};
            multiply_tile<K_KIND>(scores[n], query.terms[0], second);
        }
    }
}

// cap * tanh(score / cap), where both are counted in powers of two.
__device__ __forceinline__ float soft_capped(float score, float cap) {
    return cap - 2.0f * cap / (1.0f + exp2_fast(2.0f * LOG2_E * score / cap));
}

// The softmax of a lane's two rows so far: the largest score, and this lane's part of the sum.
struct Softmax {
    float largest[2], sum[2];
};

// Scores of a tile become probabilities in place; `rescale` gets what earlier sums must be multiplied with.
__device__ __forceinline__ void soften(float (*scores)[4], const float* k_scales, const LaneRows& rows, int first,
                                       int window, float cap, Softmax& softmax, float* rescale) {
    const int t = threadIdx.x % 4;
    float largest[2] = {softmax.largest[0], softmax.largest[1]};
    DP_UNROLL
    for (int i = 0; i < TOKEN_TILES * 4; ++i) {
        const int row = i % 4 / 2, token = i / 4 * 8 + 2 * t + i % 2, position = first + token;
        float score = scores[i / 4][i % 4];
        if (K_SCALED) score *= k_scales[token];
        if (SOFT_CAP) score = soft_capped(score, cap);
        const bool seen = position <= rows.position[row] && position >= first_visible(rows.position[row], window);
        scores[i / 4][i % 4] = score = seen ? score : MINUS_INFINITY;
        largest[row] = max_f(largest[row], score);
    }
    DP_UNROLL
    for (int row = 0; row < 2; ++row) {
        largest[row] = over_row(largest[row], true);
        const bool nothing = largest[row] == MINUS_INFINITY;
        rescale[row] = nothing ? 1.0f : exp2_fast(softmax.largest[row] - largest[row]);
        softmax.sum[row] *= rescale[row];
        softmax.largest[row] = largest[row];
    }
    DP_UNROLL
    for (int i = 0; i < TOKEN_TILES * 4; ++i) {
        const int row = i % 4 / 2;
        float& score = scores[i / 4][i % 4];
        // what is not seen is minus infinity, a NaN is not
        score = score == MINUS_INFINITY ? 0.0f : exp2_fast(score - largest[row] + RAISED);
    }
}

// The probabilities of a step of 16 tokens as the tensor core's left operand, and what they add to the sum: rounded
// they weigh the values, so rounded they are summed.
__device__ __forceinline__ void probability_step(const float (*scores)[4], int k, const float* v_scales, float unit,
                                                 u32 (*terms)[4], float* sums) {
    DP_UNROLL
    for (int i = 0; i < 4; ++i) {
        const int n = 2 * k + i / 2, row = i % 2;
        const float low = scores[n][2 * row], high = scores[n][2 * row + 1];
        if constexpr (V_SCALED) {
            const float* const scale = v_scales + 8 * n + threadIdx.x % 4 * 2;
            terms[0][i] = pack_pair<V_KIND>(low * (scale[0] * unit), high * (scale[1] * unit));
            sums[row] += low + high;
        } else if constexpr (V_TERMS == 2) {
            split_pair<V_KIND>(low, high, terms[0][i], terms[1][i]);
            sums[row] += low + high;
        } else {
            terms[0][i] = pack_pair<V_KIND>(low, high);
            sums[row] += pair_element<V_KIND>(terms[0][i], 0) + pair_element<V_KIND>(terms[0][i], 1);
        }
    }
}

// Adds the values of a step of 16 tokens. A word of V has two dimensions of one token, the operand two tokens of one
// dimension: the words of two tokens make the operands of two tiles, one of the even dimensions and one of the odd ones.
__device__ __forceinline__ void mix_step(const u32 (*terms)[4], const u32* values, int k, float (*mixed)[4]) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const u32* const row = values + (16 * k + 2 * t) * V_STRIDE + g;
    DP_UNROLL
    for (int j = 0; j < DIM_STEPS; ++j) {
        const u32 word[4] = {row[8 * j], row[8 * j + V_STRIDE], row[8 * j + 8 * V_STRIDE], row[8 * j + 9 * V_STRIDE]};
        const u32 even[2] = {permute_bytes(word[0], word[1], 0x5410u), permute_bytes(word[2], word[3], 0x5410u)};
        const u32 odd[2] = {permute_bytes(word[0], word[1], 0x7632u), permute_bytes(word[2], word[3], 0x7632u)};
        DP_UNROLL
        for (int term = 0; term < V_TERMS; ++term) {
            multiply_tile<V_KIND>(mixed[2 * j], terms[term], even);
            multiply_tile<V_KIND>(mixed[2 * j + 1], terms[term], odd);
        }
    }
}

// The unit that int8 scales are counted in: a power of two above all that were met, so that probability times scale is
// at most what fp16 holds. All lanes get it.
__device__ __forceinline__ float unit_above(float unit, const float* scales) {
    float largest = 0.0f;
    for (int token = threadIdx.x % 32; token < TILE_TOKENS; token += 32) largest = max_f(largest, scales[token]);
    DP_UNROLL
    for (int mask = 1; mask < 32; mask *= 2) largest = max_f(largest, shuffle_xor(largest, mask));
    return max_f(unit, bits_float((float_bits(largest) & 0x7f800000u) + 0x00800000u));
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    KERNEL_NAME(float* __restrict__ partial_sums,     // [rows, query heads, partitions, HEAD_DIM]
                float* __restrict__ partial_softmax,  // [rows, query heads, partitions, 2]: maximum, sum
                const float* __restrict__ queries,    // [rows, query heads, HEAD_DIM], rotated
                const u8* __restrict__ pool, const int* __restrict__ tiles,  // [tiles, 2]: first row, last row + 1
                const int* __restrict__ block_tables, const int* __restrict__ positions,
                const int* __restrict__ row_seq, int max_blocks, int block_bytes, int k_offset, int v_offset,
                int k_scale_offset, int v_scale_offset, int window, float softmax_scale,
                const float* __restrict__ key_bias,                             // [KV heads, HEAD_DIM]; read if KEY_BIAS
                const float* __restrict__ cos, const float* __restrict__ sin,  // [positions, HEAD_DIM / 2]; the same
                float soft_cap) {                                               // read if SOFT_CAP
    DP_SHARED(shared);
    u32* const keys = reinterpret_cast<u32*>(shared);
    u32* const values = reinterpret_cast<u32*>(shared + Layout::V);
    u32* const rest = reinterpret_cast<u32*>(shared + Layout::K_REST);
    float* const k_scales = reinterpret_cast<float*>(shared + Layout::K_SCALES);
    float* const v_scales = reinterpret_cast<float*>(shared + Layout::V_SCALES);
    const int lane = threadIdx.x % 32, first_packed = threadIdx.x / 32 * 16;
    const int kv_head = blockIdx.y, query_heads = gridDim.y * GROUP;

    const int first_row = tiles[2 * blockIdx.z], packed_rows = (tiles[2 * blockIdx.z + 1] - first_row) * GROUP;
    const int start = positions[first_row], last = start + packed_rows / GROUP - 1;
    const int size = prefill_partition_tokens(start), part = int(blockIdx.x) * size;
    Context context = {pool, block_tables + i64(row_seq[first_row]) * max_blocks, block_bytes, kv_head,
                       first_visible(start, window), part + size <= last ? part + size : last + 1};
    int first = part > context.begin ? part : context.begin - context.begin % TILE_TOKENS;
    if (first >= context.end) return;

    LaneRows rows;
    DP_UNROLL
    for (int i = 0; i < 2; ++i) {
        const int packed = first_packed + lane / 4 + 8 * i;
        rows.real[i] = packed < packed_rows;
        const int row = rows.real[i] ? packed / GROUP : 0;
        rows.position[i] = start + row;
        rows.head[i] = (i64(first_row) + row) * query_heads + kv_head * GROUP + packed % GROUP;
        rows.queries[i] = queries + rows.head[i] * HEAD_DIM + 4 * (lane % 4);
    }
    // Of all rows of the warp: so that its lanes go together.
    const int end_packed = first_packed + 16 < packed_rows ? first_packed + 16 : packed_rows;
    const int lowest = start + first_packed / GROUP;
    const int highest = first_packed < packed_rows ? start + (end_packed - 1) / GROUP : -1;
    const float factor = softmax_scale * LOG2_E;
    QueryStep steps[QUERIES_IN_REGISTERS ? DIM_STEPS : 1];
    if constexpr (QUERIES_IN_REGISTERS) {
        DP_UNROLL
        for (int s = 0; s < DIM_STEPS; ++s) steps[s] = rows.step(s, factor);
    }

    float mixed[2 * DIM_STEPS][4] = {};
    Softmax softmax = {{MINUS_INFINITY, MINUS_INFINITY}, {0.0f, 0.0f}};
    float unit = bits_float(0x00800000u);
    Share<K_CODEC> key_share;
    Share<V_CODEC> value_share;
    if constexpr (!KEY_BIAS) key_share.load(context, first, k_offset, k_scale_offset);

    // The next tile is on its way into registers while the present one is multiplied. After the first barrier of a
    // round the keys are there and nobody reads the values of the round before; after the second the values are
    // there and nobody reads the keys.
    for (; first < context.end; first += TILE_TOKENS) {
        if constexpr (KEY_BIAS)
            Share<K_CODEC>::store_biased(context, first, k_offset, k_scale_offset, key_bias + kv_head * HEAD_DIM, cos, sin,
                                         keys, rest);
        else
            key_share.store(keys, K_STRIDE, k_scales);
        value_share.load(context, first, v_offset, v_scale_offset);
        __syncthreads();
        const bool seen = first <= highest && first + TILE_TOKENS > first_visible(lowest, window);
        float scores[TOKEN_TILES][4] = {}, rescale[2];
        if (seen) {
            if constexpr (QUERIES_IN_REGISTERS) {
                DP_UNROLL
                for (int s = 0; s < DIM_STEPS; ++s) score_step(steps[s], keys, rest, s, scores);
            } else {
#pragma unroll 2
                for (int s = 0; s < DIM_STEPS; ++s) score_step(rows.step(s, factor), keys, rest, s, scores);
            }
            soften(scores, k_scales, rows, first, window, soft_cap * LOG2_E, softmax, rescale);
        }
        value_share.store(values, V_STRIDE, v_scales);
        if (!KEY_BIAS && first + TILE_TOKENS < context.end)
            key_share.load(context, first + TILE_TOKENS, k_offset, k_scale_offset);
        __syncthreads();
        if (!seen) continue;
        if constexpr (V_SCALED) {
            const float larger = unit_above(unit, v_scales);
            rescale[0] *= unit / larger, rescale[1] *= unit / larger;
            unit = larger;
        }
        DP_UNROLL
        for (int i = 0; i < 8 * DIM_STEPS; ++i) mixed[i / 4][i % 4] *= rescale[i % 4 / 2];
        DP_UNROLL
        for (int k = 0; k < TOKEN_TILES / 2; ++k) {
            u32 terms[V_TERMS][4];
            probability_step(scores, k, v_scales, 1.0f / unit, terms, softmax.sum);
            mix_step(terms, values, k, mixed);
        }
    }

    DP_UNROLL
    for (int i = 0; i < 2; ++i) {
        const float sum = over_row(softmax.sum[i], false);
        if (!rows.real[i]) continue;
        const i64 slot = rows.head[i] * gridDim.x + blockIdx.x;
        float* const target = partial_sums + slot * HEAD_DIM + 4 * (lane % 4);
        const float scale = V_SCALED ? unit : 1.0f;
        DP_UNROLL
        for (int j = 0; j < DIM_STEPS; ++j)
            *reinterpret_cast<Float4*>(target + 16 * j) = {mixed[2 * j][2 * i] * scale, mixed[2 * j + 1][2 * i] * scale,
                                                           mixed[2 * j][2 * i + 1] * scale,
                                                           mixed[2 * j + 1][2 * i + 1] * scale};
        if (lane % 4 == 0) {
            partial_softmax[2 * slot] = softmax.largest[i];
            partial_softmax[2 * slot + 1] = sum;
        }
    }
}

// Attention of one query row over one partition of its paged context, for all query heads of one KV head.
//
// Grid (partitions, KV heads, rows), 128 threads. A partition is walked in chunks of 128 tokens. K tiles of a chunk,
// then its V tiles, are staged in shared memory by asynchronous 16-byte copies, one tile ahead. With K, a thread
// multiplies one slice of one token's key with all queries of the group; with V, it keeps four dimensions of all heads.
// Scores, softmax (online, from chunk to chunk) and sums are fp32.
//
// Macros: HEAD_DIM, GROUP, BLOCK_SIZE, K_CODEC, V_CODEC, KEY_BIAS (0, 1: keys are stored without their bias, and
// RoPE(bias, position) is added here), SOFT_CAP (0, 1: scores become cap * tanh(score / cap)), and of the plan in decode_plan.py GROUP_PADDED, K_SLICES,
// V_SLICES, STAGE_BYTES, CTAS_PER_SM.
#include "decode_softmax.h"
#include "decode_tiles.h"

// The place of a query's dimension in shared memory: the four floats that neighbouring slices read at the same time lie
// side by side.
__device__ __forceinline__ u32 query_place(u32 dim) {
    constexpr u32 PIECE_ELEMENTS = 16 / K::ITEM_BYTES;
    const u32 piece = dim / PIECE_ELEMENTS, quad = dim % PIECE_ELEMENTS / 4;
    const u32 row = piece / K_SLICES * (PIECE_ELEMENTS / 4) + quad;
    return (row * K_SLICES + piece % K_SLICES) * 4 + dim % 4;
}

__device__ __forceinline__ float dot4(const float* four, const float* other) {
    const Float4 x = *reinterpret_cast<const Float4*>(four);
    return fma_rn(x.x, other[0], fma_rn(x.y, other[1], fma_rn(x.z, other[2], x.w * other[3])));
}

// A one-byte codec's elements come twice as fast, so its loops must cost less for each; few heads leave the registers.
constexpr int SCORE_UNROLL = K::ITEM_BYTES == 1 && GROUP <= 2 ? 2 : 1;

// Scores of one K tile: thread = token and slice. Those of tokens past the context mean nothing and are not read.
__device__ __forceinline__ void score_tile(const u8* stage, const float* queries, const u16* k_scales, float* scores) {
    constexpr int QUADS = 4 / K::ITEM_BYTES;
    const int slice = threadIdx.x % K_SLICES, row = threadIdx.x / K_SLICES;
    const u8* keys = stage + row * KTile::ROW_BYTES + slice * 16;
    float sums[GROUP] = {};
    K::Memory memory;
#pragma unroll(SCORE_UNROLL)
    for (int j = 0; j < KTile::PIECES_EACH; ++j) {
        const Words4 loaded = *reinterpret_cast<const Words4*>(keys + j * K_SLICES * 16);
        const u32 words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
        DP_UNROLL
        for (int quad = 0; quad < QUADS; ++quad) {
            float key[4];
            K::decode4(words + quad * K::ITEM_BYTES, key, memory);
            const int place = ((j * QUADS + quad) * K_SLICES + slice) * 4;
            DP_UNROLL
            for (int head = 0; head < GROUP; ++head) {
                const Float4 q = *reinterpret_cast<const Float4*>(queries + head * HEAD_DIM + place);
                sums[head] = fma_rn(q.x, key[0], sums[head]);
                sums[head] = fma_rn(q.y, key[1], sums[head]);
                sums[head] = fma_rn(q.z, key[2], sums[head]);
                sums[head] = fma_rn(q.w, key[3], sums[head]);
            }
        }
    }
    const float poison = memory.poison(0) + memory.poison(1) + memory.poison(2) + memory.poison(3);
    const float scale = K::SCALED ? half_to_float(k_scales[row]) : 1.0f;
    DP_UNROLL
    for (int head = 0; head < GROUP; ++head) {
        float score = sums[head] + poison;
        DP_UNROLL
        for (int mask = 1; mask < K_SLICES; mask *= 2) score = add_rn(score, shuffle_xor(score, mask));
        if (slice == 0) scores[row * GROUP_PADDED + head] = score * scale;
    }
}

// Adds to the scores of a chunk what the keys' bias contributes: queries times RoPE(bias, position). Thread = token.
__device__ __forceinline__ void add_bias_scores(const float* bias, const float* queries, const float* cos,
                                                const float* sin, float* scores) {
    constexpr int HALF_DIM = HEAD_DIM / 2;
    float sums[GROUP] = {};
#pragma unroll 1
    for (int dim = 0; dim < HALF_DIM; dim += 4) {
        const Float4 c = *reinterpret_cast<const Float4*>(cos + dim), s = *reinterpret_cast<const Float4*>(sin + dim);
        const Float4 low = *reinterpret_cast<const Float4*>(bias + dim);
        const Float4 high = *reinterpret_cast<const Float4*>(bias + HALF_DIM + dim);
        const float first[4] = {low.x * c.x - high.x * s.x, low.y * c.y - high.y * s.y, low.z * c.z - high.z * s.z,
                                low.w * c.w - high.w * s.w};
        const float second[4] = {high.x * c.x + low.x * s.x, high.y * c.y + low.y * s.y, high.z * c.z + low.z * s.z,
                                 high.w * c.w + low.w * s.w};
        DP_UNROLL
        for (int head = 0; head < GROUP; ++head) {
            const float* const query = queries + head * HEAD_DIM;
            sums[head] += dot4(query + query_place(dim), first) + dot4(query + query_place(HALF_DIM + dim), second);
        }
    }
    DP_UNROLL
    for (int head = 0; head < GROUP; ++head) scores[head] += sums[head] * (1.0f / K::FACTOR);
}

// The probabilities of one token for all heads of the group.
__device__ __forceinline__ void load_probabilities(const float* row, float* values) {
    if constexpr (GROUP_PADDED >= 4) {
        DP_UNROLL
        for (int head = 0; head < GROUP_PADDED; head += 4) {
            const Float4 four = *reinterpret_cast<const Float4*>(row + head);
            values[head] = four.x, values[head + 1] = four.y, values[head + 2] = four.z, values[head + 3] = four.w;
        }
    } else {
        DP_UNROLL
        for (int head = 0; head < GROUP_PADDED; ++head) values[head] = row[head];
    }
}

// As much as the registers of CTAS_PER_SM allow without spilling.
constexpr int MIX_UNROLL = V::ITEM_BYTES == 1 && GROUP <= 2 ? 8 : GROUP <= 4 ? 4 : K::ITEM_BYTES == V::ITEM_BYTES ? 2 : 1;

// Adds one V tile: thread = four dimensions of every TOKENS_AT_ONCE-th token.
constexpr int ROW_THREADS = HEAD_DIM / 4, TOKENS_AT_ONCE = THREADS / ROW_THREADS;
__device__ __forceinline__ void mix_tile(const u8* stage, const float* probabilities, float (*sums)[4],
                                         V::Memory& memory) {
    const u8* column = stage + threadIdx.x % ROW_THREADS * 4 * V::ITEM_BYTES;
#pragma unroll(MIX_UNROLL)
    for (int token = threadIdx.x / ROW_THREADS; token < VTile::TOKENS; token += TOKENS_AT_ONCE) {
        u32 words[V::ITEM_BYTES];
        if constexpr (V::ITEM_BYTES == 2) {
            const Words2 loaded = *reinterpret_cast<const Words2*>(column + token * VTile::ROW_BYTES);
            words[0] = loaded.x, words[1] = loaded.y;
        } else {
            words[0] = *reinterpret_cast<const u32*>(column + token * VTile::ROW_BYTES);
        }
        float value[4], probability[GROUP_PADDED];
        V::decode4(words, value, memory);
        load_probabilities(probabilities + token * GROUP_PADDED, probability);
        DP_UNROLL
        for (int head = 0; head < GROUP; ++head) {
            DP_UNROLL
            for (int i = 0; i < 4; ++i) sums[head][i] = fma_rn(probability[head], value[i], sums[head][i]);
        }
    }
}

__device__ __forceinline__ void swap_stages(u8*& stage, u8*& next) {
    u8* const before = stage;
    stage = next;
    next = before;
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    KERNEL_NAME(float* __restrict__ partial_sums,     // [rows, query heads, partitions, HEAD_DIM]
                float* __restrict__ partial_softmax,  // [rows, query heads, partitions, 2]: maximum, sum
                const float* __restrict__ queries,    // [rows, query heads, HEAD_DIM], rotated
                const u8* __restrict__ pool, const int* __restrict__ block_tables, const int* __restrict__ positions,
                const int* __restrict__ row_seq, int max_blocks, int block_bytes, int k_offset, int v_offset,
                int k_scale_offset, int v_scale_offset, int window, float softmax_scale,
                const float* __restrict__ key_bias,                             // [KV heads, HEAD_DIM]; read if KEY_BIAS
                const float* __restrict__ cos, const float* __restrict__ sin,   // [positions, HEAD_DIM / 2]; the same
                float soft_cap) {                                               // read if SOFT_CAP
    DP_SHARED(shared);
    float* const q_shared = reinterpret_cast<float*>(shared + Layout::QUERIES);
    float* const scores = reinterpret_cast<float*>(shared + Layout::SCORES);
    float* const buffer = reinterpret_cast<float*>(shared + Layout::REDUCE);
    float* const rescale = reinterpret_cast<float*>(shared + Layout::RESCALE);
    u16* const k_scales = reinterpret_cast<u16*>(shared + Layout::K_SCALES);
    u16* const v_scales = reinterpret_cast<u16*>(shared + Layout::V_SCALES);
    const u8** const blocks = reinterpret_cast<const u8**>(shared + Layout::BLOCKS);
    const int row = blockIdx.z, kv_head = blockIdx.y, thread = threadIdx.x;

    const int position = positions[row], visible = visible_tokens(position, window);
    const int size = partition_tokens(visible), offset = int(blockIdx.x) * size;
    if (offset >= visible) return;
    Partition part;
    part.blocks = blocks;
    part.begin = position + 1 - visible + offset;
    part.tokens = visible - offset < size ? visible - offset : size;
    part.first_block = u32(part.begin) / BLOCK_SIZE;
    part.first_slot = kv_head * BLOCK_SIZE;

    const u32 last_block = u32(part.begin + part.tokens - 1) / BLOCK_SIZE;
    const int* const table = block_tables + i64(row_seq[row]) * max_blocks + part.first_block;
    for (u32 i = thread; i <= last_block - part.first_block; i += THREADS) blocks[i] = pool + i64(table[i]) * block_bytes;
    __syncthreads();

    stage_tile<KTile>(part, k_offset, 0, shared);

    const i64 first_head = (i64(row) * gridDim.y + kv_head) * GROUP;
    const float factor = softmax_scale * (LOG2_E * K::FACTOR);
    for (u32 i = thread; i < GROUP * HEAD_DIM; i += THREADS)
        q_shared[i / HEAD_DIM * HEAD_DIM + query_place(i % HEAD_DIM)] = queries[first_head * HEAD_DIM + i] * factor;
    float* const bias = reinterpret_cast<float*>(shared + Layout::BIAS);
    if constexpr (KEY_BIAS)
        for (int i = thread; i < HEAD_DIM; i += THREADS) bias[i] = key_bias[kv_head * HEAD_DIM + i];
    if constexpr (K::SCALED || V::SCALED) {
        for (int i = thread; i < part.tokens; i += THREADS) {
            const u8* const block = part.block_of(part.begin + i);
            const int slot = part.slot_of(part.begin + i);
            if (K::SCALED) k_scales[i] = reinterpret_cast<const u16*>(block + k_scale_offset)[slot];
            if (V::SCALED) v_scales[i] = reinterpret_cast<const u16*>(block + v_scale_offset)[slot];
        }
    }

    // A tile is computed from one stage while the next one is copied into the other. The barrier says both that the tile
    // is there for every thread, and that nobody still reads the stage that is filled next.
    u8 *stage = shared, *next = shared + STAGE_BYTES;
    float sums[GROUP][4] = {};
    V::Memory memory;
    Softmax softmax = {MINUS_INFINITY, 0.0f};
    const bool mixing = thread < ROW_THREADS * TOKENS_AT_ONCE;
    for (int chunk = 0; chunk < part.tokens; chunk += CHUNK) {
        const int tokens = part.tokens - chunk < CHUNK ? part.tokens - chunk : CHUNK;
        for (int first = 0; first < tokens; first += KTile::TOKENS) {
            copies_wait<0>();
            __syncthreads();
            if (first + KTile::TOKENS < tokens)
                stage_tile<KTile>(part, k_offset, chunk + first + KTile::TOKENS, next);
            else
                stage_tile<VTile>(part, v_offset, chunk, next);
            score_tile(stage, q_shared, k_scales + chunk + first, scores + first * GROUP_PADDED);
            swap_stages(stage, next);
        }
        __syncthreads();
        if constexpr (KEY_BIAS) {
            const i64 angles = i64(part.begin + chunk + thread) * (HEAD_DIM / 2);
            if (thread < tokens)
                add_bias_scores(bias, q_shared, cos + angles, sin + angles, scores + thread * GROUP_PADDED);
            __syncthreads();
        }
        soften(scores, v_scales + chunk, tokens, soft_cap, buffer, rescale, softmax);
        DP_UNROLL
        for (int head = 0; head < GROUP; ++head) {
            DP_UNROLL
            for (int i = 0; i < 4; ++i) sums[head][i] *= rescale[head];
        }
        for (int first = 0; first < tokens; first += VTile::TOKENS) {
            copies_wait<0>();
            __syncthreads();
            if (first + VTile::TOKENS < tokens)
                stage_tile<VTile>(part, v_offset, chunk + first + VTile::TOKENS, next);
            else if (chunk + CHUNK < part.tokens)
                stage_tile<KTile>(part, k_offset, chunk + CHUNK, next);
            if (mixing) mix_tile(stage, scores + first * GROUP_PADDED, sums, memory);
            swap_stages(stage, next);
        }
    }
    __syncthreads();

    float* const gathered = reinterpret_cast<float*>(shared);
    if (mixing) {
        float* const mine = gathered + (thread / ROW_THREADS * GROUP * ROW_THREADS + thread % ROW_THREADS) * 4;
        for (int head = 0; head < GROUP; ++head) {
            DP_UNROLL
            for (int i = 0; i < 4; ++i)
                mine[head * HEAD_DIM + i] = sums[head][i] * V::FACTOR + memory.poison(i);
        }
    }
    __syncthreads();
    const i64 partitions = gridDim.x, partition = blockIdx.x;
    for (u32 i = thread; i < GROUP * HEAD_DIM; i += THREADS) {
        float total = gathered[i];
        for (int other = 1; other < TOKENS_AT_ONCE; ++other)
            total = add_rn(total, gathered[other * GROUP * HEAD_DIM + i]);
        const i64 slot = (first_head + i / HEAD_DIM) * partitions + partition;
        partial_sums[slot * HEAD_DIM + i % HEAD_DIM] = total;
    }
    if (thread < GROUP) {
        float* const place = partial_softmax + ((first_head + thread) * partitions + partition) * 2;
        place[0] = softmax.largest;
        place[1] = softmax.sum;
    }
}

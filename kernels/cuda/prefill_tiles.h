// Tiles of the stored context of one KV head: from the pool into registers, and from there as 16-bit floats into shared
// memory. Reads the macros of paged_prefill.cu.
#pragma once
#include "half_pieces.h"

#define THREADS 128

// Words between the rows of a tile in shared memory. Lanes that read a tile at the same time never meet in a bank:
// of K, two words of eight tokens and four places; of V, one word of four pairs of tokens and eight places.
#define K_STRIDE (HEAD_DIM / 2 + (HEAD_DIM % 32 ? 0 : 8))
#define V_STRIDE (HEAD_DIM / 2 + 4)

// The stored tokens `begin` to `end` - 1 of one sequence and one KV head. Others are zeros, and are not read.
struct Context {
    const u8* pool;
    const int* table;
    i64 block_bytes;
    int kv_head, begin, end;

    __device__ __forceinline__ bool holds(int position) const { return position >= begin && position < end; }
    __device__ __forceinline__ const u8* block(int position) const {
        return pool + table[u32(position) / BLOCK_SIZE] * block_bytes;
    }
    __device__ __forceinline__ int slot(int position) const { return kv_head * BLOCK_SIZE + u32(position) % BLOCK_SIZE; }
    __device__ __forceinline__ float scale(int position, int offset) const {
        return half_to_float(reinterpret_cast<const u16*>(block(position) + offset)[slot(position)]);
    }
};

// A thread's share of a tile of TILE_TOKENS tokens: pieces of 16 bytes, and one token's scale.
template <int CODEC>
struct Share {
    typedef Decoder<CODEC> Codec;
    static constexpr int PIECES = HEAD_DIM * Codec::ITEM_BYTES / 16, ALL = TILE_TOKENS * PIECES;
    static constexpr int EACH = (ALL + THREADS - 1) / THREADS;
    Words4 pieces[EACH];
    float scale;

    static __device__ __forceinline__ int piece_of(int i) { return i * THREADS + threadIdx.x; }

    __device__ __forceinline__ void load(const Context& context, int first, int offset, int scale_offset) {
        DP_UNROLL
        for (int i = 0; i < EACH; ++i) {
            const int piece = piece_of(i), position = first + piece / PIECES;
            pieces[i] = {0, 0, 0, 0};
            if ((ALL % THREADS == 0 || piece < ALL) && context.holds(position)) {
                const int place = context.slot(position) * PIECES + piece % PIECES;
                pieces[i] = reinterpret_cast<const Words4*>(context.block(position) + offset)[place];
            }
        }
        const int mine = first + int(threadIdx.x);
        scale = 0.0f;
        if (Codec::SCALED && threadIdx.x < TILE_TOKENS && context.holds(mine)) scale = context.scale(mine, scale_offset);
    }

    __device__ __forceinline__ void store(u32* tile, int stride, float* scales) const {
        typedef Halves<CODEC> Pairs;
        DP_UNROLL
        for (int i = 0; i < EACH; ++i) {
            const int piece = piece_of(i);
            if (ALL % THREADS && piece >= ALL) break;
            const u32 words[4] = {pieces[i].x, pieces[i].y, pieces[i].z, pieces[i].w};
            u32 pairs[Pairs::PAIRS];
            Pairs::unpack(words, pairs);
            Words4* const target =
                reinterpret_cast<Words4*>(tile + piece / PIECES * stride + piece % PIECES * Pairs::PAIRS);
            DP_UNROLL
            for (int j = 0; j < Pairs::PAIRS / 4; ++j)
                target[j] = {pairs[4 * j], pairs[4 * j + 1], pairs[4 * j + 2], pairs[4 * j + 3]};
        }
        if (Codec::SCALED && threadIdx.x < TILE_TOKENS) scales[threadIdx.x] = scale;
    }

    // Keys that were stored without their bias: with it, as a pair that is rounded and one of what that left. The scale
    // is in them. They come straight from the pool: there are no registers to hold them in advance.
    static __device__ __forceinline__ void store_biased(const Context& context, int first, int offset, int scale_offset,
                                                        const float* bias, const float* cos, const float* sin,
                                                        u32* tile, u32* rest) {
        constexpr int HALF_DIM = HEAD_DIM / 2, QUADS = 4 / Codec::ITEM_BYTES, KIND = Halves<CODEC>::KIND;
#pragma unroll 1
        for (int piece = threadIdx.x; piece < ALL; piece += THREADS) {
            const int token = piece / PIECES, position = first + token;
            const bool held = context.holds(position);
            float scale = held ? Codec::FACTOR : 0.0f;
            Words4 loaded = {0, 0, 0, 0};
            if (held) {
                const int place = context.slot(position) * PIECES + piece % PIECES;
                loaded = reinterpret_cast<const Words4*>(context.block(position) + offset)[place];
                if (Codec::SCALED) scale = context.scale(position, scale_offset);
            }
            const i64 angles = i64(held ? position : context.begin) * HALF_DIM;
            const u32 words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll 1
            for (int quad = 0; quad < QUADS; ++quad) {
                const int dim = (piece % PIECES * QUADS + quad) * 4, low = dim % HALF_DIM;
                const bool upper = dim >= HALF_DIM;
                const Float4 c = *reinterpret_cast<const Float4*>(cos + angles + low);
                const Float4 s = *reinterpret_cast<const Float4*>(sin + angles + low);
                const Float4 mine = *reinterpret_cast<const Float4*>(bias + dim);
                const Float4 other = *reinterpret_cast<const Float4*>(bias + (upper ? low : low + HALF_DIM));
                const float sign = upper ? 1.0f : -1.0f;
                const float rotated[4] = {mine.x * c.x + sign * other.x * s.x, mine.y * c.y + sign * other.y * s.y,
                                          mine.z * c.z + sign * other.z * s.z, mine.w * c.w + sign * other.w * s.w};
                float key[4];
                typename Codec::Memory memory;
                Codec::decode4(words + quad * Codec::ITEM_BYTES, key, memory);
                DP_UNROLL
                for (int j = 0; j < 4; ++j) key[j] = fma_rn(key[j], scale, rotated[j]) + memory.poison(j);
                Words2 rounded, left;
                split_pair<KIND>(key[0], key[1], rounded.x, left.x);
                split_pair<KIND>(key[2], key[3], rounded.y, left.y);
                *reinterpret_cast<Words2*>(tile + token * K_STRIDE + dim / 2) = rounded;
                *reinterpret_cast<Words2*>(rest + token * K_STRIDE + dim / 2) = left;
            }
        }
    }
};

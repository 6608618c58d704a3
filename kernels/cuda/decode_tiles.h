// What paged_decode.cu stages in shared memory: tiles of K and V, and where everything lies. Reads its macros.
#pragma once
#include "codecs.h"
#include "partitions.h"

#define THREADS 128
#define WARPS (THREADS / 32)
#define CHUNK 128
#define LOG2_E 1.4426950408889634f
#define MINUS_INFINITY bits_float(0xff800000u)

typedef Decoder<K_CODEC> K;
typedef Decoder<V_CODEC> V;

// One side's tile in shared memory: THREADS / SLICES tokens, each a row of 16-byte pieces. Rows are an odd multiple of
// SLICES pieces apart, so that eight neighbouring threads never meet in a bank.
template <class SIDE, int SLICES>
struct Tile {
    static constexpr int TOKENS = THREADS / SLICES;
    static constexpr int PIECES = HEAD_DIM * SIDE::ITEM_BYTES / 16;
    static constexpr int PIECES_EACH = PIECES / SLICES;
    static constexpr int ROW_BYTES = (PIECES + (PIECES_EACH % 2 ? 0 : SLICES)) * 16;
    static_assert(PIECES_EACH * SLICES == PIECES, "slices must divide a row");
    static_assert(TOKENS * ROW_BYTES <= STAGE_BYTES, "a tile must fit its stage");
};
typedef Tile<K, K_SLICES> KTile;
typedef Tile<V, V_SLICES> VTile;

constexpr int BLOCKS_BYTES = (LARGEST_PARTITION / BLOCK_SIZE + 2) / 2 * 16;

// Where things lie in shared memory, in bytes. The sums that are gathered at the end lie over all of it.
struct Layout {
    static constexpr int QUERIES = 2 * STAGE_BYTES;                           // float [GROUP, HEAD_DIM]
    static constexpr int BLOCKS = QUERIES + GROUP * HEAD_DIM * 4;             // address [blocks of a partition]
    static constexpr int SCORES = BLOCKS + BLOCKS_BYTES;                      // float [CHUNK, GROUP_PADDED]
    static constexpr int REDUCE = SCORES + CHUNK * GROUP_PADDED * 4;          // float [WARPS, GROUP_PADDED]
    static constexpr int RESCALE = REDUCE + WARPS * GROUP_PADDED * 4;         // float [GROUP_PADDED]
    static constexpr int BIAS = RESCALE + GROUP_PADDED * 4;                   // float [HEAD_DIM]
    static constexpr int K_SCALES = BIAS + KEY_BIAS * HEAD_DIM * 4;           // half [LARGEST_PARTITION]
    static constexpr int V_SCALES = K_SCALES + K::SCALED * LARGEST_PARTITION * 2;  // half [LARGEST_PARTITION]
};

struct Partition {
    const u8* const* blocks;  // shared: addresses of blocks, from the one that holds `begin`
    int begin, tokens;
    u32 first_block, first_slot;

    __device__ __forceinline__ const u8* block_of(u32 position) const {
        return blocks[position / BLOCK_SIZE - first_block];
    }
    __device__ __forceinline__ int slot_of(u32 position) const { return first_slot + position % BLOCK_SIZE; }
};

// Starts the copies of the tile that begins at token `first`. Tokens past the partition become zeros and are not read.
template <class TILE>
__device__ __forceinline__ void stage_tile(const Partition& part, int side_offset, int first, u8* stage) {
    DP_UNROLL
    for (int i = 0; i < TILE::PIECES_EACH; ++i) {
        const u32 piece = i * THREADS + threadIdx.x;
        const u32 row = piece / TILE::PIECES, column = piece % TILE::PIECES;
        const bool valid = first + row < u32(part.tokens);
        const u32 position = part.begin + (valid ? first + row : 0);
        const u32 offset = side_offset + part.slot_of(position) * (TILE::PIECES * 16) + column * 16;
        copy_16_async(stage + row * TILE::ROW_BYTES + column * 16, part.block_of(position) + offset, valid);
    }
    copies_commit();
}

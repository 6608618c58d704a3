// How weights of 4, 8 and 16 bits lie in memory: weight_tiles.py packs them, this reads them.
//
// A tile is 16 outputs by 64 inputs, in the order of the tensor core's left operand. Lane 4 g + t has the inputs 8 t to
// 8 t + 7 and 32 + 8 t to 32 + 8 t + 7 of the outputs g and g + 8: four steps of four inputs, step s from 32 (s / 2) +
// 8 t + 4 (s % 2) on, for both outputs. A step is the four registers of the operand, two elements each:
//   4 bits: one word, whose nibbles i and i + 4 are the elements of register i;
//   8 bits: two words, whose bytes 2 i and 2 i + 1 are;
//   16 bits: four words, the registers themselves.
// The lanes' words lie in pieces of 16 bytes: all lanes' first pieces, then all second ones.
//
// Macros: WEIGHT_BITS (4, 8, 16); GROUP_SIZE (32, 64, 128; 64 with 16 bits, which have no scales); MINIMA: 0 for w =
// scale * code, where 4-bit codes are less 8 and 8-bit codes signed; of 4 bits also 1 for w = scale * code + minimum, 2 for
// w = scale * (code - zero), and 3 as 1, with scale and minimum in fp32. Otherwise all of these are halves.
#pragma once
#include "mma.h"

#define TILE_OUTPUTS 16
#define TILE_INPUTS 64
#define TILE_STEPS 4
#define PIECES (WEIGHT_BITS / 4)
#define LANE (threadIdx.x % 32)
#define ZEROS 2
#define WIDE 3

__device__ __forceinline__ u32 word_of(const Words4& words, int i) {
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

// Scales and minima of the outputs g and g + 8 for the groups of a tile, as halves: scale and minimum of an output in
// one word (in fp32, one each), or without minima the scales of both outputs in one word.
struct Scales {
    static constexpr int GROUPS = GROUP_SIZE < TILE_INPUTS ? TILE_INPUTS / GROUP_SIZE : 1;
    static constexpr int TILES = GROUP_SIZE > TILE_INPUTS ? GROUP_SIZE / TILE_INPUTS : 1;
    static constexpr int WORDS = MINIMA == WIDE ? 4 * GROUPS : MINIMA ? 2 * GROUPS : GROUPS;
    u32 words[WORDS];

    __device__ __forceinline__ float scale(int group, int upper) const {
        if (MINIMA == WIDE) return bits_float(words[(4 * group + 2 * upper) % WORDS]);
        return half_to_float(MINIMA ? u16(words[(2 * group + upper) % WORDS]) : u16(words[group] >> (16 * upper)));
    }
    __device__ __forceinline__ float minimum(int group, int upper) const {
        if (MINIMA == WIDE) return bits_float(words[(4 * group + 2 * upper + 1) % WORDS]);
        const float half = half_to_float(u16(words[(2 * group + upper) % WORDS] >> 16));
        return MINIMA == ZEROS ? -mul_rn(scale(group, upper), half) : half;
    }
};

// What a lane has of a tile.
struct Codes {
    Words4 pieces[PIECES];

    __device__ __forceinline__ u32 word(int i) const { return word_of(pieces[i / 4], i % 4); }
};

// The weights as one lane reads them: tiles are counted from the output tile that it was made for.
struct Weights {
    const Words4* codes;
    const u32* scales;
    int input_tiles;

    __device__ __forceinline__ Weights(const Words4* all_codes, const u32* all_scales, int inputs, int first_tile) {
        input_tiles = (inputs + TILE_INPUTS - 1) / TILE_INPUTS;
        codes = all_codes + i64(first_tile) * input_tiles * (32 * PIECES) + LANE;
        scales = all_scales + (i64(first_tile) * groups() * 8 + LANE / 4) * Scales::WORDS;
    }
    // Of one output.
    __device__ __forceinline__ int groups() const { return (input_tiles + Scales::TILES - 1) / Scales::TILES; }

    __device__ __forceinline__ Codes load_codes(int output_tile, int input_tile) const {
        Codes loaded;
        DP_UNROLL
        for (int i = 0; i < PIECES; ++i)
            loaded.pieces[i] = load_once(codes + ((output_tile * input_tiles + input_tile) * PIECES + i) * 32);
        return loaded;
    }
    __device__ __forceinline__ Scales load_scales(int output_tile, int input_tile) const {
        const u32* const source =
            scales + (output_tile * groups() + input_tile / Scales::TILES) * (8 * Scales::WORDS);
        Scales loaded;
        if constexpr (Scales::WORDS >= 4) {
            DP_UNROLL
            for (int i = 0; i < Scales::WORDS; i += 4) {
                const Words4 words = *reinterpret_cast<const Words4*>(source + i);
                loaded.words[i] = words.x, loaded.words[i + 1] = words.y;
                loaded.words[i + 2] = words.z, loaded.words[i + 3] = words.w;
            }
        } else if constexpr (Scales::WORDS == 2) {
            const Words2 words = *reinterpret_cast<const Words2*>(source);
            loaded.words[0] = words.x, loaded.words[1] = words.y;
        } else {
            loaded.words[0] = *source;
        }
        return loaded;
    }
};

// The eight 4-bit codes of a word as the four registers of a step, exact: code with minima, else code - 8. A nibble
// under the exponent of 1024 (fp16) or 128 (bf16) is that number plus the code; four bits higher, which fp16 has room
// for, it is 1024 plus 16 times the code.
template <int KIND>
__device__ __forceinline__ void unpack_nibbles(u32 word, u32* pairs) {
    if (KIND == 1) {
        constexpr u32 OFFSET = MINIMA ? 0xc300c300u : 0xc308c308u;
        DP_UNROLL
        for (int i = 0; i < 4; ++i)
            pairs[i] = fma_pairs<1>(mask_or(word >> (4 * i), 0x000f000fu, 0x43004300u), Pairs<1>::ONES, OFFSET);
    } else {
        constexpr u32 LOW_OFFSET = MINIMA ? 0xe400e400u : 0xe408e408u;
        constexpr u32 HIGH_OFFSET = MINIMA ? 0xd400d400u : 0xd480d480u;
        DP_UNROLL
        for (int i = 0; i < 4; i += 2) {
            const u32 shifted = word >> (4 * i);
            pairs[i] = fma_pairs<2>(mask_or(shifted, 0x000f000fu, 0x64006400u), Pairs<2>::ONES, LOW_OFFSET);
            pairs[i + 1] = fma_pairs<2>(mask_or(shifted, 0x00f000f0u, 0x64006400u), 0x2c002c00u, HIGH_OFFSET);
        }
    }
}

// Step s of a tile as the tensor core's left operand.
template <int KIND>
__device__ __forceinline__ void unpack_step(const Codes& codes, int s, u32* pairs) {
    if (WEIGHT_BITS == 4) unpack_nibbles<KIND>(codes.word(s), pairs);
    DP_UNROLL
    for (int i = 0; i < 4; ++i) {
        if (WEIGHT_BITS == 8)
            pairs[i] = pair_of_bytes<KIND>(
                permute_bytes(codes.word((2 * s + i / 2) % (4 * PIECES)), 0, i % 2 ? 0x4342u : 0x4140u));
        if (WEIGHT_BITS == 16) pairs[i] = codes.word((4 * s + i) % (4 * PIECES));
    }
}

// How the context of a prefill row is cut: a function of its position alone. prefill_plan.py says the same.
#pragma once

#define MOST_PREFILL_PARTITIONS 8

// Partitions begin at multiples of this. It changes at three positions, which no tile of rows straddles.
__device__ __forceinline__ int prefill_partition_tokens(int position) {
    return position < 2048 ? 256 : position < 8192 ? 1024 : position < 32768 ? 4096 : 16384;
}

// The first token that a row sees.
__device__ __forceinline__ int first_visible(int position, int window) {
    return window && window <= position ? position + 1 - window : 0;
}

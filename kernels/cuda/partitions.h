// How the context of a row is cut. Depends on the row's own visible context alone, never on the batch or the grid.
// decode_plan.py says the same.
#pragma once

#define LARGEST_PARTITION 512

// Visible tokens of a row: all up to its position, or the last `window` of them. None for padding, whose position is -1.
__device__ __forceinline__ int visible_tokens(int position, int window) {
    const int context = position + 1;
    return window && window < context ? window : context;
}

__device__ __forceinline__ int partition_tokens(int visible) {
    return visible <= 4096 ? 128 : visible <= 16384 ? 256 : LARGEST_PARTITION;
}

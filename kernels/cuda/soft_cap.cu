// values = cap * tanh(values / cap), in place.
//
// Grid (ceil(count / 1024)), 256 threads.
#include "fours.h"
#include "tanh.h"

#define TWICE_LOG2_E 2.8853900817779268f

__device__ __forceinline__ float capped(float x, float cap) {
    return mul_rn(tanh_of(mul_rn(div_rn(magnitude(x), cap), -TWICE_LOG2_E), x), cap);
}

extern "C" __global__ void __launch_bounds__(256)
    KERNEL_NAME(float* __restrict__ values,  // [count]
                int count, float cap) {
    const i64 place = (i64(blockIdx.x) * 256 + threadIdx.x) * 4;
    if (place >= count) return;
    if (place + 4 > count) {
        for (i64 last = place; last < count; ++last) values[last] = capped(values[last], cap);
        return;
    }
    const Float4 four = load_four<0>(values, place);
    store_four<0>(values, place, {capped(four.x, cap), capped(four.y, cap), capped(four.z, cap), capped(four.w, cap)});
}

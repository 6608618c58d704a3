// Runs one CUDA kernel on the CPU. The threads of a CTA are fibers of one OS thread: a fiber runs until it meets a
// barrier or a warp operation, then the next one runs. CTAs run one after another.
//
// A kernel that would hang or be undefined on a GPU ends the launch with a reason: lanes of a warp that wait at
// different operations, or a barrier that not every thread reaches.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#define DP_HOST_SHIM 1
#define __global__
#define __device__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)

struct dp_dim3 {
    unsigned x, y, z;
};
static thread_local dp_dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace dp_shim {

enum State { READY, AT_BARRIER, AT_WARP_OP, DONE };

struct Fiber {
    ucontext_t start;
    jmp_buf at;
    bool started;
    State state;
    const void* operation;  // which warp operation it waits at
    unsigned rounds;        // warp operations so far: even and odd ones use different slots
};

constexpr int WARP = 32, MAX_THREADS = 1024, SHARED_BYTES = 48 * 1024;
constexpr size_t STACK_BYTES = 64 * 1024;

struct Machine {
    Fiber fibers[MAX_THREADS];
    uint32_t slots[2][MAX_THREADS];
    alignas(16) unsigned char shared[SHARED_BYTES];
    std::vector<char> stacks = std::vector<char>(STACK_BYTES * MAX_THREADS);
    jmp_buf scheduler;
    int current, threads;
    void (*body)(void*);
    void* closure;
    const char* fault;
};

inline Machine& machine() {
    static thread_local Machine* instance = new Machine();
    return *instance;
}

inline void suspend(State state) {
    Machine& m = machine();
    Fiber& fiber = m.fibers[m.current];
    fiber.state = state;
    if (_setjmp(fiber.at) == 0) _longjmp(m.scheduler, 1);
}

inline void enter() {
    Machine& m = machine();
    m.body(m.closure);
    m.fibers[m.current].state = DONE;
    _longjmp(m.scheduler, 1);
}

inline void resume(int thread) {
    Machine& m = machine();
    Fiber& fiber = m.fibers[thread];
    m.current = thread;
    threadIdx = {unsigned(thread), 0, 0};
    if (_setjmp(m.scheduler) != 0) return;
    if (fiber.started) _longjmp(fiber.at, 1);
    fiber.started = true;
    setcontext(&fiber.start);
}

// Runs a warp until all its threads wait at the barrier or are done.
inline void run_warp(int first, int end) {
    Machine& m = machine();
    while (!m.fault) {
        for (int t = first; t < end; ++t)
            if (m.fibers[t].state == READY) resume(t);
        int waiting = 0;
        const void* operation = nullptr;
        for (int t = first; t < end; ++t) {
            const Fiber& fiber = m.fibers[t];
            if (fiber.state != AT_WARP_OP) continue;
            if (waiting++ && operation != fiber.operation) m.fault = "lanes of a warp wait at different operations";
            operation = fiber.operation;
        }
        if (!waiting) return;
        if (waiting != end - first) m.fault = "a warp operation that not every lane reaches";
        for (int t = first; t < end; ++t)
            if (m.fibers[t].state == AT_WARP_OP) m.fibers[t].state = READY;
    }
}

inline void prepare_fiber(int thread) {
    Machine& m = machine();
    Fiber& fiber = m.fibers[thread];
    fiber.started = false;
    fiber.state = READY;
    fiber.rounds = 0;
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = m.stacks.data() + STACK_BYTES * thread;
    fiber.start.uc_stack.ss_size = STACK_BYTES;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, enter, 0);
}

// Shared memory starts as NaN patterns, so that what a kernel reads before writing it shows.
inline void run_cta(size_t shared_bytes) {
    Machine& m = machine();
    memset(m.shared, 0xff, shared_bytes);
    for (int t = 0; t < m.threads; ++t) prepare_fiber(t);
    for (int live = m.threads; live && !m.fault;) {
        for (int first = 0; first < m.threads; first += WARP)
            run_warp(first, first + WARP < m.threads ? first + WARP : m.threads);
        live = 0;
        for (int t = 0; t < m.threads; ++t) live += m.fibers[t].state != DONE;
        for (int t = 0; t < m.threads; ++t)
            if (m.fibers[t].state == AT_BARRIER) m.fibers[t].state = READY;
        if (live && live != m.threads && !m.fault) m.fault = "a barrier that not every thread reaches";
    }
}

inline uint32_t exchange(uint32_t value, int source, const void* operation) {
    Machine& m = machine();
    const int self = m.current;
    Fiber& fiber = m.fibers[self];
    uint32_t* slots = m.slots[fiber.rounds++ & 1];
    slots[self] = value;
    fiber.operation = operation;
    suspend(AT_WARP_OP);
    return slots[(self & ~(WARP - 1)) + source];
}

template <class T>
inline T as_argument(const void* bytes) {
    std::remove_const_t<T> value;
    memcpy(&value, bytes, sizeof(T));
    return value;
}

template <class... A, size_t... I>
const char* launch(void (*kernel)(A...), const unsigned* grid, unsigned threads, unsigned shared_bytes,
                   void* const* args, std::index_sequence<I...>) {
    if (threads > MAX_THREADS || shared_bytes > SHARED_BYTES) return "more threads or shared memory than a CTA has";
    auto call = [&] { kernel(as_argument<A>(args[I])...); };
    Machine& m = machine();
    m.threads = int(threads);
    m.fault = nullptr;
    m.closure = &call;
    m.body = [](void* closure) { (*static_cast<decltype(call)*>(closure))(); };
    blockDim = {threads, 1, 1};
    gridDim = {grid[0], grid[1], grid[2]};
    for (unsigned z = 0; z < grid[2]; ++z)
        for (unsigned y = 0; y < grid[1]; ++y)
            for (unsigned x = 0; x < grid[0] && !m.fault; ++x) {
                blockIdx = {x, y, z};
                run_cta(shared_bytes);
            }
    return m.fault;
}

template <class T>
constexpr char kind_of() {
    static_assert(std::is_pointer_v<T> || std::is_same_v<T, int> || std::is_same_v<T, float>, "a kernel parameter");
    return std::is_pointer_v<T> ? 'p' : std::is_same_v<T, int> ? 'i' : 'f';
}

// `kinds` has one letter for each argument: p(ointer), i(nt), f(loat).
template <class... A>
const char* launch(void (*kernel)(A...), const unsigned* grid, unsigned threads, unsigned shared_bytes,
                   void* const* args, const char* kinds) {
    const char expected[] = {kind_of<A>()..., 0};
    if (strcmp(kinds, expected)) return "arguments of other kinds than the kernel's parameters";
    return launch(kernel, grid, threads, shared_bytes, args, std::index_sequence_for<A...>{});
}

}  // namespace dp_shim

inline void __syncthreads() { dp_shim::suspend(dp_shim::AT_BARRIER); }

// Two OS threads may launch kernels that count in the same place.
inline int atomicAdd(int* address, int value) { return __atomic_fetch_add(address, value, __ATOMIC_RELAXED); }

#define DP_HOST_ENTRY(kernel)                                                                                    \
    extern "C" const char* dp_host_launch(const unsigned* grid, unsigned threads, unsigned shared_bytes,         \
                                          void* const* args, const char* kinds) {                                \
        return dp_shim::launch(kernel, grid, threads, shared_bytes, args, kinds);                                \
    }

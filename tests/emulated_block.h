// CUDA blocks on a CPU, for tests: every thread of a block is a fibre, a barrier hands over to the next fibre.
//
// Included in front of a kernel's text; `attnlib_launch` runs a grid block by block. Which thread runs first after a
// barrier is chosen by `order`, so that a missing barrier shows as a result that depends on it.
#pragma once

#include <csetjmp>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>

#define __global__
#define __device__
#define __host__
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct Index { unsigned x, y, z; };
static thread_local Index blockIdx, threadIdx;

alignas(16) unsigned char shared[1 << 18];

namespace emulated {

constexpr int most = 1024, team = 32, stack_bytes = 1 << 17;

struct Barrier {
    int size, arrived;
    long generation;
    int any, found;
};

struct Fibre {
    ucontext_t start;
    jmp_buf place;
    bool begun, done;
};

static Fibre fibres[most];
static char* stacks;
static Barrier block, teams[most / team];
static unsigned char lanes[most][8];
static int count, current, idle, step;
static jmp_buf outside;
static void (*body)();

inline void resume(int next) {
    current = next;
    threadIdx = {static_cast<unsigned>(next), 0, 0};
    Fibre& fibre = fibres[next];
    if (fibre.begun) _longjmp(fibre.place, 1);
    fibre.begun = true;
    setcontext(&fibre.start);
}

inline void hand_over() {
    if (++idle > 4 * count) {
        std::fprintf(stderr, "a barrier that not all threads reach: block %u, thread %d\n", blockIdx.x, current);
        std::abort();
    }
    int next = current;
    do next = (next + step + count) % count;
    while (fibres[next].done);
    if (next == current) return;
    if (_setjmp(fibres[current].place) == 0) resume(next);
}

inline int wait(Barrier& barrier, int value) {
    barrier.any |= value;
    const long generation = barrier.generation;
    if (++barrier.arrived == barrier.size) {
        barrier.arrived = 0;
        barrier.found = barrier.any;
        barrier.any = 0;
        ++barrier.generation;
        idle = 0;
    }
    while (barrier.generation == generation) hand_over();
    idle = 0;
    return barrier.found;
}

inline void leave(Barrier& barrier) {   // a thread that has returned counts as arrived
    --barrier.size;
    if (barrier.size > 0 && barrier.arrived == barrier.size) {
        barrier.arrived = 0;
        barrier.found = barrier.any;
        barrier.any = 0;
        ++barrier.generation;
    }
}

inline void run() {
    body();
    fibres[current].done = true;
    leave(block);
    leave(teams[current / team]);
    idle = 0;
    for (int n = 0; n < count; ++n) {
        const int next = ((current + step * (n + 1)) % count + count) % count;
        if (!fibres[next].done) resume(next);
    }
    _longjmp(outside, 1);
}

// Runs `blocks` blocks of `threads` threads; order 0 or 1: which way barriers hand over.
inline void launch(int blocks, int threads, int order, void (*kernel)()) {
    if (stacks == nullptr) stacks = static_cast<char*>(std::malloc(static_cast<size_t>(most) * stack_bytes));
    body = kernel;
    count = threads;
    step = order ? -1 : 1;
    for (int b = 0; b < blocks; ++b) {
        blockIdx = {static_cast<unsigned>(b), 0, 0};
        std::memset(shared, 0xFF, sizeof shared);   // NaN: what is read before it is written shows
        block = {threads, 0, 0, 0, 0};
        for (int n = 0; n < threads / team; ++n) teams[n] = {team, 0, 0, 0, 0};
        for (int n = 0; n < threads; ++n) {
            getcontext(&fibres[n].start);
            fibres[n].start.uc_stack.ss_sp = stacks + static_cast<size_t>(n) * stack_bytes;
            fibres[n].start.uc_stack.ss_size = stack_bytes;
            fibres[n].start.uc_link = nullptr;
            fibres[n].begun = fibres[n].done = false;
            makecontext(&fibres[n].start, run, 0);
        }
        if (_setjmp(outside) == 0) resume(order ? threads - 1 : 0);
    }
}

}  // namespace emulated

inline void __syncthreads() { emulated::wait(emulated::block, 0); }
inline int __syncthreads_or(int value) { return emulated::wait(emulated::block, value != 0); }
inline void __syncwarp() { emulated::wait(emulated::teams[emulated::current / emulated::team], 0); }

template <class T>
inline T __shfl_xor_sync(unsigned, T value, int mask) {
    const int me = emulated::current;
    std::memcpy(emulated::lanes[me], &value, sizeof value);
    __syncwarp();
    T other;
    std::memcpy(&other, emulated::lanes[me ^ mask], sizeof other);
    __syncwarp();
    return other;
}

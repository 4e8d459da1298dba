// The threads of the process: torch's, or a pool that is made at first use, asleep when idle, and made anew in a child
// after fork.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>

namespace attnlib {

// To be called when the module is loaded: from then on a child knows that it was forked.
void watch_forks();

// Serialises calls: the pool and the cached workspace belong to the holder.
class PoolLock {
public:
    PoolLock();
    ~PoolLock();
    PoolLock(const PoolLock&) = delete;
    PoolLock& operator=(const PoolLock&) = delete;
};

// Calls task(context, worker) for worker = 0 .. threads - 1, some of them on this thread; returns when all are done.
// team: how many threads the caller may use in all. OpenMP is always asked for so many, as torch asks: it ends threads
// that a smaller team has no use for, and makes new ones for the next. Needs a PoolLock. The task must not throw.
void run_parallel(int threads, int team, void (*task)(void*, int), void* context);

// At least `bytes` bytes, aligned to 64, kept for the next call while small. Needs a PoolLock. Throws std::bad_alloc.
char* shared_workspace(size_t bytes);
void trim_workspace();

// Zeroed memory, aligned to 64, of one call.
class Zeroed {
public:
    Zeroed() = default;
    explicit Zeroed(size_t bytes) {
        if (bytes == 0) return;
        raw_ = static_cast<char*>(std::calloc(bytes + 64, 1));
        if (raw_ == nullptr) throw std::bad_alloc();
    }
    ~Zeroed() { std::free(raw_); }
    Zeroed(const Zeroed&) = delete;
    Zeroed& operator=(const Zeroed&) = delete;
    char* data() const {
        return raw_ ? reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(raw_) + 63) & ~uintptr_t{63}) : nullptr;
    }

private:
    char* raw_ = nullptr;
};

}  // namespace attnlib

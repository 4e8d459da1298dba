// A job runs on the threads of the OpenMP runtime that torch uses, where this process has one: after an operator of torch
// those spin for a while, on processors that threads of our own would have to share with them. It is found by name, as
// GCC's runtime and those that stand in for it have it, so that nothing is compiled or linked for it. It does not
// survive a fork. Where there is none, in a child, and for the thread sanitizer, which cannot see into it, a job runs on
// a pool of threads:
//
// The pool hands out one job at a time. A worker spins briefly for the next job, then sleeps on a condition variable.
//
// The job is published under the mutex with a new number; a worker takes part if its index is below job.threads and the
// last one out wakes the caller. After fork the child holds none of the threads: the state is rebuilt in place, the old
// one is left behind, since its mutex may be locked by a thread that no longer exists.
#include "pool.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace attnlib {
namespace {

constexpr size_t kKeptWorkspace = size_t{64} << 20;
constexpr int kSpins = 2000;  // some 50 us: a caller in a loop finds the workers awake

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

struct Pool {
    std::mutex call;  // held for the length of a run
    std::mutex mutex;
    std::condition_variable wake, done;
    int workers = 0;  // detached threads, index 1 ..
    std::atomic<uint64_t> job{0};
    int threads = 0;
    std::atomic<int> running{0};
    void (*task)(void*, int) = nullptr;
    void* context = nullptr;
    char* workspace = nullptr;
    size_t workspace_bytes = 0;
};

Pool* g_pool = nullptr;
std::once_flag g_once;

// The OpenMP runtime of this process; null if there is none.
using Parallel = void (*)(void (*body)(void*), void* context, unsigned threads, unsigned flags);

Parallel find_runtime() {
#if defined(__SANITIZE_THREAD__)
    return nullptr;
#else
    return reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
#endif
}

// Whether this process is a child that has not become another program since: threads of an OpenMP runtime stayed behind,
// also where this module is loaded after the fork.
bool is_fork() {
#if defined(__linux__)
    constexpr unsigned kForkedNoExec = 0x40;  // PF_FORKNOEXEC of the flags, the ninth field
    std::FILE* file = std::fopen("/proc/self/stat", "r");
    if (file == nullptr) return false;
    char text[512] = {};
    const size_t size = std::fread(text, 1, sizeof(text) - 1, file);
    std::fclose(file);
    const char* behind_name = size > 0 ? std::strrchr(text, ')') : nullptr;
    unsigned flags = 0;
    if (behind_name == nullptr || std::sscanf(behind_name + 1, " %*c %*d %*d %*d %*d %*d %u", &flags) != 1) return false;
    return (flags & kForkedNoExec) != 0;
#else
    return false;
#endif
}

bool g_forked = false;

struct Job {
    int threads;
    void (*task)(void*, int);
    void* context;
    std::atomic<int> next{0};

    static void run(void* object) {  // a runtime may give any number of threads
        Job& job = *static_cast<Job*>(object);
        for (int index; (index = job.next.fetch_add(1, std::memory_order_relaxed)) < job.threads;) job.task(job.context, index);
    }
};

void after_fork() {
    g_pool = new Pool;
    g_forked = true;
}

Pool& pool() {
    std::call_once(g_once, [] {
        g_pool = new Pool;  // never destroyed: workers may outlive main
        pthread_atfork(nullptr, nullptr, after_fork);
    });
    return *g_pool;
}

void work(Pool* p, int index, uint64_t seen) {
    for (;;) {
        for (int spin = 0; spin < kSpins && p->job.load(std::memory_order_acquire) == seen; ++spin) relax();
        int threads;
        void (*task)(void*, int);
        void* context;
        {
            std::unique_lock<std::mutex> lock(p->mutex);
            p->wake.wait(lock, [&] { return p->job.load(std::memory_order_relaxed) != seen; });
            seen = p->job.load(std::memory_order_relaxed);
            threads = p->threads;
            task = p->task;
            context = p->context;
        }
        if (index >= threads) continue;
        task(context, index);
        if (p->running.fetch_sub(1, std::memory_order_acq_rel) == 1) {
            std::lock_guard<std::mutex> lock(p->mutex);
            p->done.notify_one();
        }
    }
}

}  // namespace

void watch_forks() {
    pool();
    g_forked = is_fork();
}

PoolLock::PoolLock() { pool().call.lock(); }
PoolLock::~PoolLock() { pool().call.unlock(); }

void run_parallel(int threads, int team, void (*task)(void*, int), void* context) {
    if (threads <= 1) return task(context, 0);
    static const Parallel runtime = find_runtime();
    if (runtime != nullptr && !g_forked) {
        Job job{threads, task, context};
        return runtime(Job::run, &job, static_cast<unsigned>(team > threads ? team : threads), 0);
    }
    Pool& p = pool();
    {
        std::unique_lock<std::mutex> lock(p.mutex);
        while (p.workers < threads - 1) {
            std::thread(work, &p, p.workers + 1, p.job.load(std::memory_order_relaxed)).detach();
            ++p.workers;
        }
        p.threads = threads;
        p.task = task;
        p.context = context;
        p.running.store(threads - 1, std::memory_order_relaxed);
        p.job.fetch_add(1, std::memory_order_release);
    }
    p.wake.notify_all();
    task(context, 0);
    for (int spin = 0; spin < kSpins && p.running.load(std::memory_order_acquire) != 0; ++spin) relax();
    std::unique_lock<std::mutex> lock(p.mutex);
    p.done.wait(lock, [&] { return p.running.load(std::memory_order_acquire) == 0; });
}

char* shared_workspace(size_t bytes) {
    Pool& p = pool();
    if (p.workspace_bytes < bytes) {
        std::free(p.workspace);
        p.workspace = nullptr;
        p.workspace_bytes = 0;
        void* fresh = nullptr;
        if (posix_memalign(&fresh, 64, bytes) != 0) throw std::bad_alloc();
        p.workspace = static_cast<char*>(fresh);
        p.workspace_bytes = bytes;
    }
    return p.workspace;
}

void trim_workspace() {
    Pool& p = pool();
    if (p.workspace_bytes <= kKeptWorkspace) return;
    std::free(p.workspace);
    p.workspace = nullptr;
    p.workspace_bytes = 0;
}

}  // namespace attnlib

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
#include <thread>
#include <type_traits>
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

// The OpenMP runtime of this process.
struct OpenMp {
    void (*parallel)(void (*body)(void*), void* context, unsigned threads, unsigned flags) = nullptr;  // null: none
    int (*index)() = nullptr;
    int (*count)() = nullptr;

    OpenMp() {
#if !defined(__SANITIZE_THREAD__)
        const auto find = [](const char* name, auto& function) {
            function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(RTLD_DEFAULT, name));
            return function != nullptr;
        };
        if (!find("omp_get_thread_num", index) || !find("omp_get_num_threads", count)) return;
        find("GOMP_parallel", parallel);
#endif
    }
};

bool g_forked = false;

struct Job {
    const OpenMp& runtime;
    int threads;
    void (*task)(void*, int);
    void* context;

    static void run(void* object) {  // a runtime may give fewer threads than it was asked for
        const Job& job = *static_cast<const Job*>(object);
        const int count = job.runtime.count();
        for (int index = job.runtime.index(); index < job.threads; index += count) job.task(job.context, index);
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

void watch_forks() { pool(); }

PoolLock::PoolLock() { pool().call.lock(); }
PoolLock::~PoolLock() { pool().call.unlock(); }

void run_parallel(int threads, void (*task)(void*, int), void* context) {
    if (threads <= 1) return task(context, 0);
    static const OpenMp runtime;
    if (runtime.parallel != nullptr && !g_forked) {
        Job job{runtime, threads, task, context};
        return runtime.parallel(Job::run, &job, static_cast<unsigned>(threads), 0);
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

#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <exception>
#include <mutex>
#include <new>

namespace vllm {
namespace {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t seen) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}
void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

// One segment: a job's tag, the first task left and the end, in one word so that a claim is one compare-and-swap. The tag
// makes a late thread's claim on an old job fail.
constexpr int kBits = 20;
constexpr uint64_t kField = (uint64_t{1} << kBits) - 1;
constexpr int kMaxTasks = static_cast<int>(kField);
inline uint64_t segment(uint64_t tag, uint64_t begin, uint64_t end) { return (tag << (2 * kBits)) | (begin << kBits) | end; }
constexpr uint64_t kTagMask = (uint64_t{1} << (64 - 2 * kBits)) - 1;

struct alignas(64) Slot {
  std::atomic<uint64_t> word{0};
};

constexpr int64_t kSpinAfterSession = 100'000;  // ns a worker stays awake after a session ends: steps follow closely
constexpr int64_t kSpinBeforeYield = 30'000;    // ns before a waiting thread lets others have its core

struct Pool {
  alignas(64) std::atomic<uint64_t> job{0};        // number of the newest job; its low bits are the segments' tag
  alignas(64) std::atomic<int> done{0};            // finished tasks of the newest job
  alignas(64) std::atomic<uint32_t> awake{0};      // futex word: 1 inside a session
  std::atomic<int> sleepers{0};
  TaskFn fn = nullptr;
  void* context = nullptr;
  std::atomic<int> participants{1};
  Slot slots[kMaxThreads];

  std::mutex session_mutex;  // held by the thread that has the session
  int workers = 0;  // started ones; worker w is thread w + 1
  std::exception_ptr failure;
  std::atomic<bool> failed{false};

  // Takes one task of job `tag` for thread `self`, or -1.
  int claim(uint64_t tag, int self, int threads) {
    std::atomic<uint64_t>& own = slots[self].word;
    uint64_t word = own.load(std::memory_order_acquire);
    while ((word >> (2 * kBits)) == tag) {
      const uint64_t begin = (word >> kBits) & kField, end = word & kField;
      if (begin >= end) break;
      if (own.compare_exchange_weak(word, segment(tag, begin + 1, end), std::memory_order_acq_rel)) return static_cast<int>(begin);
    }
    for (int step = 1; step < threads; ++step) {
      int victim = self + step;
      if (victim >= threads) victim -= threads;
      std::atomic<uint64_t>& other = slots[victim].word;
      word = other.load(std::memory_order_acquire);
      while ((word >> (2 * kBits)) == tag) {
        const uint64_t begin = (word >> kBits) & kField, end = word & kField;
        if (begin >= end) break;
        if (other.compare_exchange_weak(word, segment(tag, begin, end - 1), std::memory_order_acq_rel))
          return static_cast<int>(end - 1);
      }
    }
    return -1;
  }

  void work(uint64_t tag, int self, int threads) {
    int finished = 0;
    for (int task; (task = claim(tag, self, threads)) >= 0;) {
      // A claimed task keeps the job alive, so fn and context are this job's.
      try {
        fn(context, task, self);
      } catch (...) {
        if (!failed.exchange(true)) failure = std::current_exception();
      }
      ++finished;
    }
    if (finished > 0) done.fetch_add(finished, std::memory_order_acq_rel);
  }

  void worker(int self) {
    uint64_t seen = 0;
    int64_t idle_since = 0;
    for (int spins = 0;; ++spins) {
      const uint64_t newest = job.load(std::memory_order_acquire);
      if (newest != seen) {
        seen = newest;
        const int threads = participants.load(std::memory_order_relaxed);
        if (self < threads) work(newest & kTagMask, self, threads);
        idle_since = 0;
        spins = 0;
        continue;
      }
      relax();
      if ((spins & 63) != 63) continue;
      const int64_t now = now_ns();
      if (idle_since == 0) idle_since = now;
      if (awake.load(std::memory_order_acquire) == 0) {
        if (now - idle_since < kSpinAfterSession) continue;
        sleepers.fetch_add(1, std::memory_order_seq_cst);
        futex_wait(awake, 0);
        sleepers.fetch_sub(1, std::memory_order_seq_cst);
        idle_since = 0;
      } else if (now - idle_since > kSpinBeforeYield) {
        sched_yield();
      }
    }
  }

  void grow(int threads) {
    while (workers < threads - 1) {
      struct Start {
        Pool* pool;
        int self;
      };
      auto* start = new Start{this, workers + 1};
      pthread_attr_t attributes;
      pthread_attr_init(&attributes);
      pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
      pthread_t thread;
      // Signals stay with the threads of the program.
      sigset_t all, before;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before);
      const int rc = pthread_create(
          &thread, &attributes,
          [](void* raw) -> void* {
            const Start copy = *static_cast<Start*>(raw);
            delete static_cast<Start*>(raw);
            copy.pool->worker(copy.self);
            return nullptr;
          },
          start);
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      pthread_attr_destroy(&attributes);
      if (rc != 0) {
        delete start;
        return;  // fewer threads than asked for: the results are the same
      }
      ++workers;
    }
  }
};

// Made once and never destroyed: its workers are detached and may be asleep in it while the process ends.
Pool* g_pool = nullptr;
thread_local int session_depth = 0;

void after_fork_in_child() {
  // The child has only the thread that forked. It gets a fresh pool; the old one's memory is left alone.
  g_pool = new Pool;
  session_depth = 0;
}

Pool& pool() {
  static const bool made = [] {
    g_pool = new Pool;
    pthread_atfork(nullptr, nullptr, after_fork_in_child);
    return true;
  }();
  (void)made;
  return *g_pool;
}

}  // namespace

Session::Session(int threads) {
  Pool& p = pool();
  if (session_depth++ > 0) return;
  p.session_mutex.lock();
  threads = threads < 1 ? 1 : (threads > kMaxThreads ? kMaxThreads : threads);
  p.grow(threads);
  p.participants.store(threads < p.workers + 1 ? threads : p.workers + 1, std::memory_order_relaxed);
  p.awake.store(1, std::memory_order_seq_cst);
  if (p.sleepers.load(std::memory_order_seq_cst) > 0) futex_wake_all(p.awake);
}

Session::~Session() {
  Pool& p = pool();
  if (--session_depth > 0) return;
  p.awake.store(0, std::memory_order_release);
  p.session_mutex.unlock();
}

int session_threads() { return pool().participants.load(std::memory_order_relaxed); }

void run_tasks(int count, TaskFn fn, void* context) {
  Pool& p = pool();
  const int threads = p.participants.load(std::memory_order_relaxed);
  for (int start = 0; start < count; start += kMaxTasks) {  // one job unless there are more than a million tasks
    const int n = count - start < kMaxTasks ? count - start : kMaxTasks;
    struct Shifted {
      TaskFn fn;
      void* context;
      int start;
    } shifted{fn, context, start};
    if (start == 0) {
      p.fn = fn;
      p.context = context;
    } else {
      p.fn = [](void* raw, int task, int thread) {
        auto* s = static_cast<Shifted*>(raw);
        s->fn(s->context, s->start + task, thread);
      };
      p.context = &shifted;
    }
    const uint64_t number = p.job.load(std::memory_order_relaxed) + 1;
    const uint64_t tag = number & kTagMask;
    p.done.store(0, std::memory_order_relaxed);
    for (int t = 0; t < threads; ++t) {
      const uint64_t begin = static_cast<uint64_t>(n) * t / threads, end = static_cast<uint64_t>(n) * (t + 1) / threads;
      p.slots[t].word.store(segment(tag, begin, end), std::memory_order_release);
    }
    p.job.store(number, std::memory_order_release);
    p.work(tag, 0, threads);
    int64_t since = 0;
    for (int spins = 0; p.done.load(std::memory_order_acquire) != n; ++spins) {
      relax();
      if ((spins & 63) != 63) continue;
      const int64_t now = now_ns();
      if (since == 0) since = now;
      if (now - since > kSpinBeforeYield) sched_yield();
    }
    if (p.failed.load(std::memory_order_acquire)) {
      std::exception_ptr failure = p.failure;
      p.failure = nullptr;
      p.failed.store(false);
      std::rethrow_exception(failure);
    }
  }
}

}  // namespace vllm

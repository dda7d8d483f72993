// The thread pool: one for the process, shared by every engine in it.
//
// A job is a number of tasks. Each thread owns a contiguous segment of them, which it takes from the front, so that a thread
// knows which task it will most likely do next (and can prefetch it); when its own segment is empty it takes tasks from the
// back of another's. A job is over when all its tasks are done, not when all threads have arrived: a thread that the machine
// has taken away holds up only the task it is in.
//
//   segment of thread 0        segment of thread 1
//   [0 1 2 3 4 5 6 7 8]        [9 10 11 12 13 14 15 16 17]
//    -> own        <- stolen    -> own               <- stolen
//
// Which thread does a task never changes a result.
#pragma once

#include <cstdint>

#include "common.h"

namespace vllm {

using TaskFn = void (*)(void* context, int task, int thread);

constexpr int kMaxThreads = 256;

// While a Session lives this thread has the pool for itself and the workers stay awake between jobs. Sessions nest in one
// thread. Another thread's session waits for it.
class Session {
 public:
  explicit Session(int threads);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
};

// Threads that the current session may use (the caller is one of them); `thread` in tasks is below it.
int session_threads();

// Runs tasks 0 .. count - 1 and returns when all are done. Must be called inside a Session, not inside a task.
void run_tasks(int count, TaskFn fn, void* context);

template <class Body>
void parallel_for(int count, Body&& body) {  // body(int task, int thread)
  if (count <= 0) return;
  if (count == 1) {
    body(0, 0);
    return;
  }
  using Plain = std::remove_reference_t<Body>;
  run_tasks(
      count, [](void* context, int task, int thread) { (*static_cast<Plain*>(context))(task, thread); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace vllm

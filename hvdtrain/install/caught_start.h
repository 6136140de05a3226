// Injected into Horovod's operations.cc: init returns an error when the ranks cannot meet.
//
// Horovod connects to the other ranks in its own thread. Nobody catches an exception there (a rank is dead, or the
// store of addresses is closed), so stock Horovod aborts the process. Here it is caught and reported through Horovod's
// flag `initialization_failed`, so that init returns false. The thread then waits for shutdown, which joins it and
// leaves the state as it was before init: another init may follow.
//
// When the thread ends, it empties the queue once more. A Python thread that checked `shut_down` just before it was set
// may enqueue a tensor after Horovod has emptied the queue, and would wait for its result forever. If such a thread does
// so even after that, a thread of its own empties the queue: releasing a tensor takes Python's global lock, which the
// one that enqueues may hold.
//
// Exceptions after init are thrown as before. Of the calls of `thread`, only the one that starts Horovod's thread has
// two arguments.

#ifndef HVDTRAIN_CAUGHT_START_H
#define HVDTRAIN_CAUGHT_START_H

#include <atomic>
#include <chrono>
#include <cstdio>
#include <exception>
#include <thread>

#include "tensor_queue.h"

namespace hvdtrain {

inline std::atomic<bool> thread_is_over{false};

inline void end_late_work(horovod::common::TensorQueue& queue) {
  if (thread_is_over)
    std::thread([&queue] { queue.FinalizeTensorQueue(horovod::common::SHUT_DOWN_ERROR); }).detach();
}

template <class Loop> auto caught(Loop* loop) {
  return [loop](auto reference) {
    auto& state = reference.get();
    thread_is_over = false;
    try {
      loop(state);
      thread_is_over = true;
      state.process_set_table.Get(0).tensor_queue.FinalizeTensorQueue(horovod::common::SHUT_DOWN_ERROR);
    } catch (const std::exception& error) {
      if (state.initialization_done)
        throw;
      std::fprintf(stderr, "Horovod could not be initialized: %s\n", error.what());
      state.initialization_failed = true;
      while (!state.shut_down)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      state.initialization_failed = false;
    }
  };
}

} // namespace hvdtrain

#define thread(loop, state) thread(::hvdtrain::caught(loop), state)

#endif

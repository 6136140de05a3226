// Injected into Horovod's operations.cc: init returns an error when the ranks cannot meet.
//
// Horovod connects to the other ranks in its own thread. Nobody catches an exception there (a rank is dead, or the
// store of addresses is closed), so stock Horovod aborts the process. Here it is caught and reported through Horovod's
// flag `initialization_failed`, so that init returns false. The thread then waits for shutdown, which joins it and
// leaves the state as it was before init: another init may follow.
//
// When the thread ends, it empties the queue once more. A Python thread that checked `shut_down` just before it was set
// may enqueue a tensor after Horovod has emptied the queue, and would wait for its result forever. If such a thread does
// so even after that, another thread empties the queue: releasing a tensor takes Python's global lock, which the one
// that enqueues may hold. This is the queue of all ranks, which lives as long as the process; others end with their set
// of ranks.
//
// Exceptions after init are thrown as before. Of the calls of `thread`, only the one that starts Horovod's thread has
// two arguments.

#ifndef HVDTRAIN_CAUGHT_START_H
#define HVDTRAIN_CAUGHT_START_H

#include <atomic>
#include <chrono>
#include <cstdio>
#include <exception>
#include <system_error>
#include <thread>

#include "tensor_queue.h"

namespace hvdtrain {

// The queue of a thread that is over; none while one runs.
inline std::atomic<horovod::common::TensorQueue*> left_queue{nullptr};

inline void end_late_work(horovod::common::TensorQueue* queue) {
  if (queue != left_queue)
    return;
  try {
    std::thread([queue] {
      if (queue == left_queue)
        queue->FinalizeTensorQueue(horovod::common::SHUT_DOWN_ERROR);
    }).detach();
  } catch (const std::system_error&) {
    // There is no thread left: the tensor waits, as in stock Horovod.
  }
}

template <class Loop> auto caught(Loop* loop) {
  return [loop](auto reference) {
    auto& state = reference.get();
    left_queue = nullptr;
    try {
      loop(state);
      left_queue = &state.process_set_table.Get(0).tensor_queue;
      left_queue.load()->FinalizeTensorQueue(horovod::common::SHUT_DOWN_ERROR);
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

// Included before everything else where Horovod's operations.cc is compiled: when ranks cannot meet, init says so.
//
// Horovod connects to the other ranks in a thread of its own. What is thrown there, because one of them is gone or the
// store with their addresses is closed, nobody catches: the process is aborted, with all that it holds. Here it is
// caught, and told to who waits in init by the flag that Horovod has for other reasons, so that init returns false. The
// thread then waits for shutdown, which joins it, and leaves all as it was before init: another may follow.
//
// When the thread ends it empties the queue once more. A thread of Python's that looked at `shut_down` just before it was
// set may enqueue a tensor after Horovod has emptied the queue, and would wait for its result without end.
//
// What is thrown once init is over goes where it went. Of the calls of `thread` only the one that starts Horovod's thread
// has two arguments.

#ifndef HVDTRAIN_CAUGHT_START_H
#define HVDTRAIN_CAUGHT_START_H

#include <chrono>
#include <cstdio>
#include <exception>
#include <thread>

#include "tensor_queue.h"

namespace hvdtrain {

template <class Loop> auto caught(Loop* loop) {
  return [loop](auto reference) {
    auto& state = reference.get();
    try {
      loop(state);
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

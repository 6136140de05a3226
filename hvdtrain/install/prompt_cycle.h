// Included before everything else where Horovod's operations.cc is compiled: the thread that does the exchanges sleeps
// for the rest of a cycle only as long as nobody puts work into its queue.
//
// Work is put there by AddToTensorQueue and AddToTensorQueueMulti. Their argument comes to hold an object which rings
// when the whole statement is over, the queue's lock released. What a cycle puts back, because other ranks are not ready,
// goes another way and does not ring. Of the calls of sleep_for only the cycle's has a duration in nanoseconds; the others
// wait for initialisation and the like, in milliseconds, and stay what they are.
//
// All that others rely on stays: there is at least one cycle in HOROVOD_CYCLE_TIME, for shutdown, join, stalls and the
// work of other ranks. A rank that wakes early waits for the others in MPI, as it does for a rank that is late.

#ifndef HVDTRAIN_PROMPT_CYCLE_H
#define HVDTRAIN_PROMPT_CYCLE_H

#include "blocking_mpi.h"
#include "prompt.h"
#include "tensor_queue.h"

namespace hvdtrain {

struct RingWork {
  ~RingWork() {
    if (prompt())
      work.ring();
  }
};

} // namespace hvdtrain

namespace std {
namespace this_thread {

inline void hvdtrain_sleep_for(chrono::milliseconds duration) { sleep_for(duration); }

inline void hvdtrain_sleep_for(chrono::nanoseconds rest_of_cycle) {
  static const char mark[] = HVDTRAIN_MARK;
  asm volatile("" : : "r"(mark));
  static thread_local uint64_t heard = 0;
  ::hvdtrain::block_in_mpi_once();
  if (::hvdtrain::prompt())
    ::hvdtrain::work.wait(heard, rest_of_cycle);
  else
    sleep_for(rest_of_cycle);
}

} // namespace this_thread
} // namespace std

#define sleep_for hvdtrain_sleep_for
#define AddToTensorQueue(entry, message) AddToTensorQueue((::hvdtrain::RingWork(), entry), message)
#define AddToTensorQueueMulti(entries, messages) AddToTensorQueueMulti((::hvdtrain::RingWork(), entries), messages)

#endif

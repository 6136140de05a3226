// Injected into Horovod's operations.cc: the thread that does the exchanges sleeps for the rest of a cycle, but wakes
// when work is queued.
//
// AddToTensorQueue and AddToTensorQueueMulti queue work. Their argument gets a temporary object that rings at the end
// of the whole statement, after the queue's lock is released; caught_start.h ends work that is queued too late. Work that a cycle puts back, because other ranks are not
// ready, takes another path and does not ring. Of the calls of sleep_for, only the cycle's has a duration in
// nanoseconds; the others wait in milliseconds for initialisation and the like, and stay as they are.
//
// Work for which other ranks were not ready is tried again after 50 us, then less and less often: a rank that sleeps
// with pending work would be late when the last of the others is ready. Work is pending as long as fewer results than
// pieces of work have rung. Refused work never rings for a result; it causes one extra try after each later piece of
// work.
//
// A rank that has nothing to exchange looks at least every 10 ms, for shutdown, stalls and process sets: each look is a
// small collective of all ranks, which once a millisecond takes 1% of a core between hosts. It delays nobody: an
// exchange begins when the last rank has work for it, which rings. A rank that wakes early waits for the others in MPI,
// as it does for a late rank.

#ifndef HVDTRAIN_PROMPT_CYCLE_H
#define HVDTRAIN_PROMPT_CYCLE_H

#include <algorithm>

#include "blocking_mpi.h"
#include "caught_start.h" // another change to the same source
#include "prompt.h"
#include "tensor_queue.h"

namespace hvdtrain {

struct Queued {
  horovod::common::TensorQueue& queue;
  ~Queued() {
    if (prompt())
      work.ring();
    end_late_work(&queue);
  }
};

inline void wait_for_work(std::chrono::nanoseconds rest_of_cycle) {
  constexpr std::chrono::nanoseconds kSoon = std::chrono::microseconds(50);
  constexpr std::chrono::nanoseconds kIdle = std::chrono::milliseconds(10);
  static thread_local std::uint64_t heard = 0;
  static thread_local std::chrono::nanoseconds patience = kSoon;
  const std::uint64_t before = heard;
  const bool waits_for_others = work.rings() != finished.rings();
  work.wait(heard, waits_for_others ? std::min(patience, rest_of_cycle) : std::max(kIdle, rest_of_cycle));
  patience = waits_for_others && heard == before ? std::min(2 * patience, rest_of_cycle) : kSoon;
}

} // namespace hvdtrain

namespace std {
namespace this_thread {

inline void hvdtrain_sleep_for(chrono::milliseconds duration) { sleep_for(duration); }

inline void hvdtrain_sleep_for(chrono::nanoseconds rest_of_cycle) {
  static const char mark[] = HVDTRAIN_MARK;
  asm volatile("" : : "r"(mark));
  ::hvdtrain::block_in_mpi_once();
  if (::hvdtrain::prompt())
    ::hvdtrain::wait_for_work(rest_of_cycle);
  else
    sleep_for(rest_of_cycle);
}

} // namespace this_thread
} // namespace std

#define sleep_for hvdtrain_sleep_for
#define HVDTRAIN_QUEUED ::hvdtrain::Queued{process_set.tensor_queue}
#define AddToTensorQueue(entry, message) AddToTensorQueue((HVDTRAIN_QUEUED, entry), message)
#define AddToTensorQueueMulti(entries, messages) AddToTensorQueueMulti((HVDTRAIN_QUEUED, entries), messages)

#endif

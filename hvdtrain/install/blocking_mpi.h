// Lets Open MPI 4 wait for TCP in the kernel instead of polling all sockets.
//
// Open MPI's opal_progress calls libevent without waiting (EVLOOP_ONCE | EVLOOP_NONBLOCK). With EVLOOP_ONCE alone,
// libevent waits until a socket is readable, or writable if something is to be written. A timer of 1 ms in the same
// loop ends each wait soon, for events that use no socket.
//
// This is right only where everything that this rank waits for uses TCP: one rank a host, no other fabric. So it is
// active only with HVDTRAIN_BLOCK_IN_MPI. The symbols are Open MPI 4's; in another MPI they are missing, and nothing
// happens.

#ifndef HVDTRAIN_BLOCKING_MPI_H
#define HVDTRAIN_BLOCKING_MPI_H

#include <sys/time.h>

#include "prompt.h"

extern "C" {
extern void* opal_sync_event_base __attribute__((weak));
int opal_progress_set_event_flag(int) __attribute__((weak));
void* opal_libevent2022_event_new(void*, int, short, void (*)(int, short, void*), void*) __attribute__((weak));
int opal_libevent2022_event_add(void*, const struct timeval*) __attribute__((weak));
}

namespace hvdtrain {

inline void ignore_tick(int, short, void*) {}

inline bool block_in_mpi() {
  constexpr short kPersist = 0x10; // libevent's EV_PERSIST
  constexpr int kOnce = 0x01;      // libevent's EVLOOP_ONCE
  if (!is_on("HVDTRAIN_BLOCK_IN_MPI") || !&opal_sync_event_base || !opal_progress_set_event_flag ||
      !opal_libevent2022_event_new || !opal_libevent2022_event_add || opal_sync_event_base == nullptr)
    return false;
  void* tick = opal_libevent2022_event_new(opal_sync_event_base, -1, kPersist, ignore_tick, nullptr);
  const struct timeval period = {0, 1000};
  if (tick == nullptr || opal_libevent2022_event_add(tick, &period) != 0)
    return false;
  opal_progress_set_event_flag(kOnce);
  return true;
}

// Called in the thread that calls MPI, after MPI_Init.
inline void block_in_mpi_once() {
  static const bool tried = (block_in_mpi(), true);
  (void)tried;
}

} // namespace hvdtrain

#endif

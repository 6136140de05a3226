// Injected into Horovod's timeline.cc: the thread that writes the Timeline sleeps for 10 ms where stock Horovod only
// yields, which on an idle core means to spin.
//
// The macro renames `yield` and does not replace `yield()`: a macro with arguments would also match functions of other
// libraries with that name. Renamed functions keep their definitions, as far as headers define them, and the one that
// is called here, std::this_thread::yield, is defined below under the new name. (Names in std are reserved for the
// standard library; ours has our name in it and collides with none.)
//
// The text HVDTRAIN_MARK gets into the library only where the renamed function is called.

#ifndef HVDTRAIN_QUIET_TIMELINE_H
#define HVDTRAIN_QUIET_TIMELINE_H

#include <chrono>
#include <thread>

namespace std {
namespace this_thread {

inline void hvdtrain_yield() {
  static const char mark[] = HVDTRAIN_MARK;
  asm volatile("" : : "r"(mark));
  sleep_for(chrono::milliseconds(10));
}

} // namespace this_thread
} // namespace std

#define yield hvdtrain_yield

#endif

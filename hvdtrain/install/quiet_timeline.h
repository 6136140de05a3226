// Included before everything else where Horovod's timeline.cc is compiled: the thread that writes its Timeline then
// sleeps for 10 milliseconds where it would only let other threads have a turn, which on a core that nobody else wants
// means to run without end.
//
// `yield` is renamed, not `yield()` replaced: a macro with arguments would meet functions of other libraries that have
// the same name and take some. Under the new name these still are what they were, as far as headers define them, and
// the one that is called here, std::this_thread::yield, is found where the standard library's is looked for. (Names in
// std are the standard library's to give; one with our name in it is in nobody's way.)
//
// The text HVDTRAIN_MARK comes into the library wherever the renamed function is called, and only then.

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

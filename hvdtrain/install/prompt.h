// What the threads of Horovod wait for instead of looking at it again and again: bells, that others ring.
//
// As it comes, Horovod's own thread looks for work once in a cycle, and who waits for a result looks whether it is there
// without end, letting other threads have a turn in between. Where ranks fill the cores, looking takes the cores from the
// exchange that is looked for. Included before everything else where `compiler.CHANGES` says.
//
// Everything is as it comes unless HVDTRAIN_PROMPT is set, and not to 0, when it is first asked for.

#ifndef HVDTRAIN_PROMPT_H
#define HVDTRAIN_PROMPT_H

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>

namespace hvdtrain {

inline bool is_on(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr && std::strcmp(value, "0") != 0;
}

inline bool prompt() {
  static const bool asked_for = is_on("HVDTRAIN_PROMPT");
  return asked_for;
}

// A bell that somebody may wait for. What was rung since `heard` is not waited for, so that no ring is missed by who
// looks after he has heard and before he waits.
class Bell {
public:
  void ring() {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      ++rings_;
    }
    rung_.notify_all();
  }

  template <class Duration> void wait(std::uint64_t& heard, Duration at_most) {
    std::unique_lock<std::mutex> guard(mutex_);
    rung_.wait_for(guard, at_most, [&] { return rings_ != heard; });
    heard = rings_;
  }

  std::uint64_t rings() const {
    std::lock_guard<std::mutex> guard(mutex_);
    return rings_;
  }

private:
  mutable std::mutex mutex_;
  std::condition_variable rung_;
  std::uint64_t rings_ = 0;
};

inline Bell work;     // rung when something was put into Horovod's queue
inline Bell finished; // rung when something has got its result

} // namespace hvdtrain

#endif

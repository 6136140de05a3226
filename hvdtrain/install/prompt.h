// Events that Horovod's threads wait for instead of polling.
//
// Stock Horovod's own thread looks for work once a cycle, and a caller that waits for a result polls, with a yield in
// between. Where ranks fill the cores, polling takes processor time from the exchange itself. Included first in the
// sources that `compiler.CHANGES` names.
//
// Nothing changes unless HVDTRAIN_PROMPT is set, and not to 0, when it is first read.

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

// An event with a counter. A waiter passes the count that it has seen (`heard`) and returns at once if the event was
// rung since, so it misses no ring between its check and its wait.
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
inline Bell finished; // rung when a result is ready

} // namespace hvdtrain

#endif

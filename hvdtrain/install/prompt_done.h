// Injected into Horovod's handle_manager.cc: a finished result rings.
//
// The result is ready once `results_[handle]` is made by the only call of std::make_shared in that file. The lock is
// held then, so a waiter that wakes waits for the lock and finds the result.

#ifndef HVDTRAIN_PROMPT_DONE_H
#define HVDTRAIN_PROMPT_DONE_H

#include <memory>

#include "handle_manager.h" // its own definitions stay as they are
#include "prompt.h"

namespace std {

template <class T, class... Arguments> shared_ptr<T> hvdtrain_make_shared(Arguments&&... arguments) {
  static const char mark[] = HVDTRAIN_MARK;
  asm volatile("" : : "r"(mark));
  if (::hvdtrain::prompt())
    ::hvdtrain::finished.ring();
  return make_shared<T>(forward<Arguments>(arguments)...);
}

} // namespace std

#define make_shared hvdtrain_make_shared

#endif

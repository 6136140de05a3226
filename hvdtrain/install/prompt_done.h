// Included before everything else where Horovod's handle_manager.cc is compiled: a result that is there rings.
//
// It is there once `results_[handle]` is made, by the one call of std::make_shared in that file, the lock held: who is
// woken waits for the lock and then sees it.

#ifndef HVDTRAIN_PROMPT_DONE_H
#define HVDTRAIN_PROMPT_DONE_H

#include <memory>

#include "handle_manager.h" // what it defines itself stays as it is
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

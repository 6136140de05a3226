// Injected into Horovod's tensor_queue.cc: a shutdown releases the tensors that are still in the queue after it has
// released its locks.
//
// Releasing a tensor that Python knows takes Python's global lock. Horovod's thread does this in its shutdown while it
// holds the locks of the queue and of the process sets. A Python thread that enqueues a tensor holds the global lock
// and waits for one of these two: a deadlock, which stops all Python threads. It is that of horovod/horovod#3352 at a
// place that its fix left out. It happens when a rank is lost, or shuts down, while another one enqueues the gradients
// of its backward.
//
// The only call of clear() in that file empties the table of tensors. Here the table is swapped with an empty one, and
// its content is released when Horovod's thread ends: `horovod_shutdown` waits for that without the global lock.

#ifndef HVDTRAIN_LATE_RELEASE_H
#define HVDTRAIN_LATE_RELEASE_H

#include <list>

#include "tensor_queue.h"

namespace hvdtrain {

inline horovod::common::TensorTable& released_at_end_of_thread() {
  static const char mark[] = HVDTRAIN_MARK;
  asm volatile("" : : "r"(mark));
  static thread_local std::list<horovod::common::TensorTable> tables;
  return tables.emplace_back();
}

} // namespace hvdtrain

#define clear() swap(::hvdtrain::released_at_end_of_thread())

#endif

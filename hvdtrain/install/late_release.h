// Included before everything else where Horovod's tensor_queue.cc is compiled: a shutdown releases the tensors that are
// still in the queue after it has given back its locks.
//
// To release a tensor that Python knows takes Python's global lock. Horovod's thread does so in its shutdown while it
// holds the lock of the queue and that of the process sets. A thread of Python's that enqueues a tensor holds the global
// lock and waits for one of these two. Then neither thread goes on, and with the global lock held no other thread of
// Python does. It is the deadlock of horovod/horovod#3352 at a place that its fix left out. It happens where a rank is
// lost, or shuts down, while another one enqueues the gradients of its backward pass.
//
// The one call of clear() in that file empties the table of tensors. Here the table is exchanged for an empty one, and
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

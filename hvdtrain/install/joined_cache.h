// Injected into Horovod's controller.cc: a rank that has called join takes part in cached sums, but in no other cached
// collective.
//
// Horovod refuses an allgather or alltoall while a rank has joined, but checks this only when the ranks negotiate. For
// a cached collective, the joined rank reports that it is ready. It then executes an allgather with the counts of
// another rank, or an alltoall with none: results are wrong, or it crashes.
//
// Here the joined rank reports these cache entries as invalid, as if a tensor had changed its shape. They are
// negotiated again, and refused. The only call of list_all_bits() in that file lists what the rank reports as ready.

#ifndef HVDTRAIN_JOINED_CACHE_H
#define HVDTRAIN_JOINED_CACHE_H

#include <cstdint>
#include <vector>

#include "response_cache.h"

namespace hvdtrain {

inline std::vector<std::uint32_t> bits_of_sums(
    const horovod::common::ResponseCache& cache, horovod::common::CacheCoordinator& coordinator) {
  static const char mark[] = HVDTRAIN_MARK;
  asm volatile("" : : "r"(mark));
  std::vector<std::uint32_t> sums;
  for (std::uint32_t bit : cache.list_all_bits()) {
    const auto type = cache.peek_response(bit).response_type();
    if (type == horovod::common::Response::ALLREDUCE || type == horovod::common::Response::ADASUM) {
      sums.push_back(bit);
    } else {
      coordinator.record_invalid_bit(bit);
      coordinator.set_uncached_in_queue(true);
    }
  }
  return sums;
}

} // namespace hvdtrain

#define list_all_bits() list_all_bits(), ::hvdtrain::bits_of_sums(response_cache_, cache_coordinator)

#endif

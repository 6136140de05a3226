// Included before everything else where Horovod's controller.cc is compiled: a rank that has called join takes part in
// cached sums, and in no other cached collective.
//
// Horovod refuses an allgather or alltoall while a rank has joined. But it looks at that only when the ranks negotiate,
// and what was negotiated once is cached: the rank that has joined says of each cached collective that it is ready. It
// then executes an allgather with the counts of another rank, or an alltoall with none: results are wrong, or it crashes.
//
// Here it says of these that their cache entries are invalid, as a rank does whose tensor has changed its shape. They are
// negotiated again, and refused. The one call of list_all_bits() in that file lists what the rank says it is ready for.

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

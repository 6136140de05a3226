// Injected into Gloo's pair.cc: when a connection ends, pending sends and receives fail at once, also those of messages
// that are half sent or half received.
//
// Stock Gloo reports the error only to messages that have not begun to travel. The others are known only to `rx_` and
// `tx_`, so their callers wait for Gloo's timeout: 10 s or more if a rank is killed in the middle of a message larger
// than the socket's buffers.
//
// The pair wakes its own waiters by notify_all at three places: where it has just stored the error, where it is closed
// because of it, and where a buffer is registered. At the first two the error is set, and the pair's lock is held. A
// second report to a buffer has no effect. A buffer that no longer exists is skipped: the pointer is weak.

#ifndef HVDTRAIN_PAIR_ERRORS_H
#define HVDTRAIN_PAIR_ERRORS_H

#include <algorithm>
#include <array>
#include <sstream>

#include "gloo/common/error.h"
#include "gloo/common/logging.h"
#include "gloo/transport/tcp/buffer.h"
#include "gloo/transport/tcp/context.h"
#include "gloo/transport/tcp/pair.h"
#include "gloo/transport/tcp/unbound_buffer.h"

namespace hvdtrain {

// Neither struct is ever instantiated: they give access to protected members of a buffer and a pair.
struct OpenBuffer : gloo::transport::tcp::UnboundBuffer {
  static void report(gloo::transport::tcp::UnboundBuffer& buffer, const std::exception_ptr& error) {
    (buffer.*(&OpenBuffer::signalException))(error);
  }
};

struct OpenPair : gloo::transport::tcp::Pair {
  static void report(gloo::transport::tcp::Pair& pair) {
    static const char mark[] = HVDTRAIN_MARK;
    asm volatile("" : : "r"(mark));
    const auto& error = pair.*(&OpenPair::ex_);
    if (error == nullptr)
      return;
    report(pair.*(&OpenPair::rx_), error);
    for (auto& op : pair.*(&OpenPair::tx_))
      report(op, error);
  }

 private:
  static void report(gloo::transport::tcp::Op& op, const std::exception_ptr& error) {
    gloo::NonOwningPtr<gloo::transport::tcp::UnboundBuffer> buffer(op.ubuf);
    if (buffer)
      OpenBuffer::report(*buffer.operator->(), error);
  }
};

} // namespace hvdtrain

#define notify_all() notify_all(), ::hvdtrain::OpenPair::report(*this)

#endif

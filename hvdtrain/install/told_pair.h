// Included before everything else where Gloo's pair.cc is compiled: when a connection ends, who waits for a message that
// is half sent or half received is told.
//
// A pair tells those whose messages have not begun to go over the wire. Of the others it has let go: what is being
// received it holds in `rx_` alone, what is being sent in `tx_`, and nobody else knows of them. Who waits for one of them
// waits until Gloo's timeout, though the other rank is known to be gone: 10 s or more for a rank that is killed amid a
// message that is larger than the socket's buffers.
//
// The pair wakes its own waiters by notify_all at three places: where it has just taken in the error, where it is closed
// for that, and where a buffer is registered. The error is set at the first two, and the pair's lock held. To tell a
// buffer twice does nothing more; one that is gone is not told, its pointer being a weak one.

#ifndef HVDTRAIN_TOLD_PAIR_H
#define HVDTRAIN_TOLD_PAIR_H

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

// Never made, as the other: what a buffer or a pair leaves to its heirs has names here.
struct OpenBuffer : gloo::transport::tcp::UnboundBuffer {
  static void tell(gloo::transport::tcp::UnboundBuffer& buffer, const std::exception_ptr& error) {
    (buffer.*(&OpenBuffer::signalException))(error);
  }
};

struct OpenPair : gloo::transport::tcp::Pair {
  static void tell(gloo::transport::tcp::Pair& pair) {
    static const char mark[] = HVDTRAIN_MARK;
    asm volatile("" : : "r"(mark));
    const auto& error = pair.*(&OpenPair::ex_);
    if (error == nullptr)
      return;
    tell(pair.*(&OpenPair::rx_), error);
    for (auto& op : pair.*(&OpenPair::tx_))
      tell(op, error);
  }

 private:
  static void tell(gloo::transport::tcp::Op& op, const std::exception_ptr& error) {
    gloo::NonOwningPtr<gloo::transport::tcp::UnboundBuffer> buffer(op.ubuf);
    if (buffer)
      OpenBuffer::tell(*buffer.operator->(), error);
  }
};

} // namespace hvdtrain

#define notify_all() notify_all(), ::hvdtrain::OpenPair::tell(*this)

#endif

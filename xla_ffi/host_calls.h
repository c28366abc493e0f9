// What the handlers of the host backend share: call sites, and how the ranks of
// a call meet.
#ifndef JAX_EP_XLA_FFI_HOST_CALLS_H_
#define JAX_EP_XLA_FFI_HOST_CALLS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cc/cpu/moves.h"
#include "cc/cpu/rendezvous.h"
#include "xla/ffi/api/ffi.h"
#include "xla_ffi/host_handlers.h"

namespace jax_ep {

// The state of a call site of `op`, from its attributes "comm" and "channel".
xla::ffi::ErrorOr<std::unique_ptr<HostCallSite>> InstantiateHostCall(
    const char* op, xla::ffi::Dictionary attributes);

// A call that ended in an error.
xla::ffi::Future Failed(const std::string& message);

// A meeting that is complete, and which one it is.
struct Met {
  HostCallSite* site;
  int64_t run;
  int group;
  std::shared_ptr<cpu::Meeting> meeting;

  const HostCommunicator& comm() const { return *site->communicator; }
  bool local() const { return comm().IsLocal(group); }
};

// Of this device on the program's mesh; the first operand of every call.
using Position = xla::ffi::BufferR0<xla::ffi::U32>;

// Enters this device's rank with `arrival`; `work` runs on the last rank's
// thread, and ends in the meeting's Finish(). Where a rank refuses, because its
// device stands elsewhere on the program's mesh, nothing is written: without
// other processes `work` does not run, else it ends in Post().
xla::ffi::Future Meet(HostCallSite* site, xla::ffi::RunId run, int32_t ordinal,
                      const Position& position, std::shared_ptr<void> arrival,
                      const std::function<void(const Met&)>& work);

// Buffers by rank; ranks of other processes have none.
template <typename T>
std::vector<T> Arrivals(const Met& met) {
  std::vector<T> result(met.comm().num_ranks);
  const std::vector<int>& ranks = met.meeting->ranks();
  for (size_t i = 0; i < ranks.size(); ++i) {
    result[ranks[i]] = *static_cast<const T*>(met.meeting->arrivals()[i].get());
  }
  return result;
}

// Lets other processes take part in a call whose ranks here have met, or tells
// them why one of these refuses.
void Post(const Met& met, const cpu::CallShape& shape,
          std::vector<std::unique_ptr<cpu::Move>> shares,
          std::function<void(const std::string& error)> done);

}  // namespace jax_ep

#endif  // JAX_EP_XLA_FFI_HOST_CALLS_H_

// Communicators by id: where set-up meets the data path.
//
// Python creates and releases entries; a call site takes its own reference when
// an executable is loaded, so the last of them frees a communicator.
#ifndef JAX_EP_XLA_FFI_REGISTRY_H_
#define JAX_EP_XLA_FFI_REGISTRY_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "xla/ffi/api/ffi.h"
#include "xla_ffi/attributes.h"

namespace jax_ep {

template <typename Communicator>
class Registry {
 public:
  static Registry& Get() {
    // Never destroyed: executables may outlive every static.
    static Registry* registry = new Registry;
    return *registry;
  }

  void Add(int64_t id, std::shared_ptr<Communicator> communicator) {
    std::lock_guard<std::mutex> lock(mutex_);
    communicators_[id] = std::move(communicator);
  }

  void Remove(int64_t id) {
    std::shared_ptr<Communicator> last;  // freed outside the lock
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = communicators_.find(id);
    if (found == communicators_.end()) return;
    last = std::move(found->second);
    communicators_.erase(found);
  }

  xla::ffi::ErrorOr<std::shared_ptr<Communicator>> Find(int64_t id,
                                                        const char* platform) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = communicators_.find(id);
    if (found != communicators_.end()) return found->second;
    return xla::ffi::Unexpected(FailedPrecondition(
        "jax_ep: communicator " + std::to_string(id) +
        " is closed or was not set up for platform " + platform +
        "; an executable has to be compiled while its communicator is open. "
        "Where there is a new communicator, an old trace holds the closed one: "
        "make the jitted function anew, or call jax.clear_caches()"));
  }

 private:
  std::mutex mutex_;
  std::map<int64_t, std::shared_ptr<Communicator>> communicators_;
};

// What the attributes of a call site say.
template <typename Communicator>
struct SiteAttributes {
  std::shared_ptr<Communicator> communicator;
  int64_t channel;
};

template <typename Communicator>
xla::ffi::ErrorOr<SiteAttributes<Communicator>> ReadSite(
    const xla::ffi::Dictionary& attributes, const char* platform) {
  const auto numbers = Integers(attributes, {"comm", "channel"});
  if (numbers.has_error()) return xla::ffi::Unexpected(numbers.error());
  const auto [id, channel] = *numbers;
  auto communicator = Registry<Communicator>::Get().Find(id, platform);
  if (communicator.has_error()) {
    return xla::ffi::Unexpected(communicator.error());
  }
  return SiteAttributes<Communicator>{*std::move(communicator), channel};
}

}  // namespace jax_ep

#endif  // JAX_EP_XLA_FFI_REGISTRY_H_

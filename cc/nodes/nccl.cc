#include "cc/nodes/nccl.h"

#include <dlfcn.h>

#include <atomic>
#include <mutex>

namespace jax_ep::nccl {
namespace {

constexpr char kName[] = "libnccl.so.2";

std::mutex mutex;
std::atomic<const Functions*> loaded{nullptr};

template <typename Function>
bool Find(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  return function != nullptr;
}

void* Open(const std::vector<std::string>& files, std::string* problem) {
  // JAX's own: two copies in a process would each want the GPU's resources.
  void* library = dlopen(kName, RTLD_NOW | RTLD_NOLOAD);
  if (library != nullptr) return library;
  for (const std::string& file : files) {
    library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library != nullptr) return library;
  }
  library = dlopen(kName, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const reason = dlerror();
    *problem = std::string("NCCL cannot be loaded: ") +
               (reason != nullptr ? reason : kName);
  }
  return library;
}

}  // namespace

std::string VersionName(int version) {
  // 2.8 and older counted otherwise; they are too old in either way.
  return std::to_string(version / 10000) + "." +
         std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

const Functions* Load(const std::vector<std::string>& files,
                      std::string* problem) {
  std::lock_guard<std::mutex> lock(mutex);
  if (loaded != nullptr) return loaded;
  void* const library = Open(files, problem);
  if (library == nullptr) return nullptr;
  static Functions functions;
  Functions& f = functions;
  if (!Find(library, "ncclGetVersion", f.get_version) ||
      !Find(library, "ncclGetErrorString", f.get_error_string) ||
      !Find(library, "ncclGetUniqueId", f.get_unique_id) ||
      !Find(library, "ncclCommInitRank", f.init_rank) ||
      !Find(library, "ncclCommGetAsyncError", f.get_async_error) ||
      !Find(library, "ncclCommDestroy", f.destroy) ||
      !Find(library, "ncclCommAbort", f.abort) ||
      !Find(library, "ncclGroupStart", f.group_start) ||
      !Find(library, "ncclGroupEnd", f.group_end) ||
      !Find(library, "ncclSend", f.send) ||
      !Find(library, "ncclRecv", f.receive)) {
    *problem = std::string(kName) + " lacks a function: " + dlerror();
    return nullptr;
  }
  int version = 0;
  if (f.get_version(&version) != kSuccess || version < kOldest) {
    *problem = "NCCL " + VersionName(version) + " is too old; it must be " +
               VersionName(kOldest) + " or newer";
    return nullptr;
  }
  loaded = &functions;
  return loaded;
}

const Functions* Loaded() { return loaded; }

}  // namespace jax_ep::nccl

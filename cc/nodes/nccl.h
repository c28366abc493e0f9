// The part of NCCL that the wire needs, from the library that JAX has loaded.
//
// Nothing is linked and NCCL's header is not used: the few functions are
// declared here, as they have been since NCCL 2.7, and looked up by name.
#ifndef JAX_EP_CC_NODES_NCCL_H_
#define JAX_EP_CC_NODES_NCCL_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>
#include <vector>

namespace jax_ep::nccl {

// ncclComm, opaque.
struct Communicator;
// ncclUniqueId: passed by value.
struct UniqueId {
  char bytes[128];
};
// ncclResult_t. All but these two are errors.
inline constexpr int kSuccess = 0;
inline constexpr int kInProgress = 7;
// ncclUint8.
inline constexpr int kByte = 1;
// What JAX's wheels ask for at least, as ncclGetVersion counts.
inline constexpr int kOldest = 21801;

struct Functions {
  int (*get_version)(int*);
  const char* (*get_error_string)(int);
  int (*get_unique_id)(UniqueId*);
  int (*init_rank)(Communicator**, int num_ranks, UniqueId, int rank);
  int (*get_async_error)(Communicator*, int*);
  int (*destroy)(Communicator*);
  int (*abort)(Communicator*);
  int (*group_start)();
  int (*group_end)();
  int (*send)(const void*, size_t, int type, int peer, Communicator*,
              cudaStream_t);
  int (*receive)(void*, size_t, int type, int peer, Communicator*,
                 cudaStream_t);
};

// "2.28.3"
std::string VersionName(int version);

// The library that is loaded already, else the first of `files` that loads.
// Looked up once, by whoever asks first. nullptr where there is none or one too
// old, with the reason in `problem`.
const Functions* Load(const std::vector<std::string>& files,
                      std::string* problem);
// What was loaded; nullptr before Load().
const Functions* Loaded();

}  // namespace jax_ep::nccl

#endif  // JAX_EP_CC_NODES_NCCL_H_

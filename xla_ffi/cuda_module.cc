// jax_ep._cuda: handlers and communicators of the CUDA backend for Python.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cc/layout.h"
#include "cc/peer_view.h"
#include "cc/self_test.h"
#include "nanobind/nanobind.h"
#include "nanobind/stl/string.h"
#include "nanobind/stl/tuple.h"
#include "nanobind/stl/vector.h"
#include "xla_ffi/capsules.h"
#include "xla_ffi/cuda_expert_handlers.h"
#include "xla_ffi/cuda_flight_handlers.h"
#include "xla_ffi/cuda_handlers.h"
#include "xla_ffi/registry.h"

namespace jax_ep {
namespace {

namespace nb = nanobind;

nb::dict Handlers() {
  nb::dict handlers;
  handlers["jax_ep_plan"] = Handler(EpInstantiate, EpPlan);
  handlers["jax_ep_dispatch"] = Handler(EpInstantiate, EpDispatch);
  handlers["jax_ep_combine"] = Handler(EpInstantiate, EpCombine);
  handlers["jax_ep_dispatch_start"] =
      Handler(EpStartInstantiate, EpDispatchStart);
  handlers["jax_ep_dispatch_done"] = Handler(EpDoneInstantiate, EpDispatchDone);
  handlers["jax_ep_combine_start"] =
      Handler(EpStartInstantiate, EpCombineStart);
  handlers["jax_ep_combine_done"] = Handler(EpDoneInstantiate, EpCombineDone);
  handlers["jax_ep_expert_rows"] = Handler(EpExpertRows);
  handlers["jax_ep_permute"] = Handler(EpPermute);
  handlers["jax_ep_unpermute"] = Handler(EpUnpermute);
  handlers["jax_ep_row_dots"] = Handler(EpRowDots);
  return handlers;
}

nb::dict Types() {
  nb::dict types;
  types["jax_ep_cuda_call_site"] = Type(&CudaCallSite::id, &kCudaCallSiteInfo);
  types["jax_ep_cuda_start_site"] =
      Type(&CudaStartSite::id, &kCudaStartSiteInfo);
  types["jax_ep_cuda_done_site"] = Type(&CudaDoneSite::id, &kCudaDoneSiteInfo);
  return types;
}

// A fixed share of the multiprocessors: 24 of an H200's 132 fill its link and
// leave the rest to the experts.
int32_t DefaultSms(int32_t ordinal) {
  int count = 0;
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, ordinal);
  return std::max(1, count * 2 / 11);
}

// (device ordinal, group, rank, address of its zeroed control memory)
using Place = std::tuple<int32_t, int32_t, int32_t, uintptr_t>;

void CreateCommunicator(int64_t id, const std::vector<Place>& places,
                        int32_t num_ranks, int32_t num_sms, double timeout_s) {
  std::map<std::pair<int32_t, int32_t>, std::byte*> control;
  for (const auto& [ordinal, group, rank, address] : places) {
    control[{group, rank}] = reinterpret_cast<std::byte*>(address);
  }
  auto communicator = std::make_shared<CudaCommunicator>();
  for (const auto& [ordinal, group, rank, address] : places) {
    PeerView view = {};
    view.rank = rank;
    view.num_ranks = num_ranks;
    view.num_sms = num_sms > 0 ? num_sms : DefaultSms(ordinal);
    view.has_bulk = HasBulk(ordinal);
    view.timeout_ns = static_cast<uint64_t>(timeout_s * 1e9);
    for (int32_t peer = 0; peer < num_ranks; ++peer) {
      view.control[peer] = control[{group, peer}];
    }
    communicator->views[ordinal] = view;
  }
  Registry<CudaCommunicator>::Get().Add(id, std::move(communicator));
}

NB_MODULE(_cuda, m) {
  m.def("ffi_version", &FfiVersion);
  m.def("handlers", &Handlers);
  m.def("types", &Types);
  m.def("num_handler_calls", &NumHandlerCalls);
  m.def("control_bytes",
        [](int32_t num_ranks) { return ControlLayout(num_ranks).size(); });
  m.def("self_test", &SelfTest, nb::arg("ordinal"),
        nb::call_guard<nb::gil_scoped_release>());
  m.def("create_communicator", &CreateCommunicator, nb::arg("id"),
        nb::arg("places"), nb::arg("num_ranks"), nb::arg("num_sms"),
        nb::arg("timeout_s"));
  m.def(
      "release_communicator",
      [](int64_t id) { Registry<CudaCommunicator>::Get().Remove(id); },
      nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace
}  // namespace jax_ep

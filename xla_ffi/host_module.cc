// jax_ep._host: handlers and communicators of the host backend for Python.
#include <cstdint>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "cc/expert_layout.h"
#include "cc/layout.h"
#include "nanobind/nanobind.h"
#include "nanobind/stl/tuple.h"
#include "nanobind/stl/vector.h"
#include "xla_ffi/capsules.h"
#include "xla_ffi/host_expert_handlers.h"
#include "xla_ffi/host_handlers.h"
#include "xla_ffi/registry.h"

namespace jax_ep {
namespace {

namespace nb = nanobind;

nb::dict Handlers() {
  nb::dict handlers;
  handlers["jax_ep_plan"] = Handler(EpPlanInstantiate, EpPlan);
  handlers["jax_ep_dispatch"] = Handler(EpDispatchInstantiate, EpDispatch);
  handlers["jax_ep_combine"] = Handler(EpCombineInstantiate, EpCombine);
  handlers["jax_ep_expert_rows"] = Handler(EpExpertRows);
  handlers["jax_ep_permute"] = Handler(EpPermute);
  handlers["jax_ep_unpermute"] = Handler(EpUnpermute);
  handlers["jax_ep_row_dots"] = Handler(EpRowDots);
  return handlers;
}

nb::dict Types() {
  nb::dict types;
  types["jax_ep_host_call_site"] = Type(&HostCallSite::id, &kHostCallSiteInfo);
  return types;
}

// places: (device ordinal, group, rank) of every local device.
void CreateCommunicator(
    int64_t id, const std::vector<std::tuple<int32_t, int, int>>& places,
    int num_ranks, double timeout_s) {
  auto communicator = std::make_shared<HostCommunicator>();
  communicator->num_ranks = num_ranks;
  communicator->timeout_s = timeout_s;
  for (const auto& [ordinal, group, rank] : places) {
    communicator->places[ordinal] = {group, rank};
  }
  Registry<HostCommunicator>::Get().Add(id, std::move(communicator));
}

NB_MODULE(_host, m) {
  m.def("ffi_version", &FfiVersion);
  m.def("handlers", &Handlers);
  m.def("types", &Types);
  m.def("create_communicator", &CreateCommunicator, nb::arg("id"),
        nb::arg("places"), nb::arg("num_ranks"), nb::arg("timeout_s"));
  m.def("release_communicator",
        [](int64_t id) { Registry<HostCommunicator>::Get().Remove(id); });
  m.def("expert_rows_workspace_size", &ExpertRowsWorkspaceSize,
        nb::arg("num_pairs"), nb::arg("local_experts"));
  m.def("plan_workspace_size", &PlanWorkspaceSize, nb::arg("num_ranks"),
        nb::arg("num_experts"));
}

}  // namespace
}  // namespace jax_ep

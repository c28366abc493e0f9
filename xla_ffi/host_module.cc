// jax_ep._host: handlers and communicators of the host backend for Python.
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cc/cpu/alarms.h"
#include "cc/handshake/control_slots.h"
#include "cc/handshake/wait_limits.h"
#include "cc/layout/experts.h"
#include "cc/layout/few_tokens.h"
#include "cc/layout/low_latency.h"
#include "cc/layout/pushed_plan.h"
#include "cc/layout/staging.h"
#include "nanobind/nanobind.h"
#include "nanobind/stl/optional.h"
#include "nanobind/stl/string.h"
#include "nanobind/stl/tuple.h"
#include "nanobind/stl/vector.h"
#include "xla_ffi/host_calls.h"
#include "xla_ffi/module.h"
#include "xla_ffi/registry.h"

namespace jax_ep {
namespace {

namespace nb = nanobind;

// What connects the processes of a communicator, by their position among them.
struct ExchangeArguments {
  std::vector<int> numbers;  // JAX's process indices
  int64_t staging_bytes;
  int64_t num_channels;
  std::vector<int> memories;
  std::vector<int> sockets;
};

std::unique_ptr<cpu::Exchange> CreateExchange(const ExchangeArguments& from,
                                              int me,
                                              const WaitLimits& limits) {
  std::unique_ptr<cpu::Exchange> exchange = cpu::Exchange::Create(
      {.numbers = from.numbers,
       .me = me,
       .limits = limits,
       .layout = StagingLayout(from.staging_bytes, from.num_channels,
                               static_cast<int64_t>(from.numbers.size())),
       .memories = from.memories,
       .sockets = from.sockets});
  if (exchange == nullptr) {
    throw std::runtime_error("jax_ep: cannot map the shared memory");
  }
  return exchange;
}

// places: (device ordinal, group, rank, its place on the mesh) of every local
// device. processes: where each rank is, [group][rank], by position; `me` is
// this one's.
void CreateCommunicator(
    int64_t id, const std::vector<std::tuple<int32_t, int, int, Mesh>>& places,
    int num_ranks, double timeout_s, double warn_after_s,
    const std::vector<std::vector<int>>& processes, int me,
    const std::optional<ExchangeArguments>& exchange,
    const std::string& scope) {
  cpu::Alarms::Get();  // its thread is started, or this is an error
  auto communicator = std::make_shared<HostCommunicator>();
  communicator->num_ranks = num_ranks;
  communicator->limits = {.warn_after = Duration(warn_after_s),
                          .timeout = Duration(timeout_s)};
  communicator->scope = scope;
  communicator->process_id = getpid();
  for (const auto& [ordinal, group, rank, mesh] : places) {
    communicator->places[ordinal] = {group, rank, MeshPlaceOf(mesh)};
  }
  for (const std::vector<int>& process : processes) {
    cpu::GroupPlaces group = {me, process};
    std::vector<int> ranks;
    for (int rank = 0; rank < num_ranks; ++rank) {
      if (group.Here(rank)) ranks.push_back(rank);
    }
    communicator->local_ranks.push_back(std::move(ranks));
    communicator->group_places.push_back(std::move(group));
  }
  if (exchange) {
    communicator->exchange =
        CreateExchange(*exchange, me, communicator->limits);
  }
  Registry<HostCommunicator>::Get().Add(id, std::move(communicator));
}

NB_MODULE(_host, m) {
  DefineShared(m);
  nb::class_<ExchangeArguments>(m, "ExchangeArguments")
      .def(nb::init<std::vector<int>, int64_t, int64_t, std::vector<int>,
                    std::vector<int>>(),
           nb::arg("numbers"), nb::arg("staging_bytes"),
           nb::arg("num_channels"), nb::arg("memories"), nb::arg("sockets"));
  m.def("create_communicator", &CreateCommunicator, nb::arg("id"),
        nb::arg("places"), nb::arg("num_ranks"), nb::arg("timeout_s"),
        nb::arg("warn_after_s"), nb::arg("processes"), nb::arg("me"),
        nb::arg("exchange").none(), nb::arg("scope") = "");
  m.def("abandon_after_fork", &cpu::Exchange::AbandonAfterFork);
  m.def("begin_program", &cpu::CallSites::BeginProgram);
  m.def("release_communicator",
        [](int64_t id) { Registry<HostCommunicator>::Get().Remove(id); });
  m.def("dispatch_permute_workspace_size", &DispatchPermuteWorkspaceSize,
        nb::arg("num_ranks"));
  m.def("expert_rows_workspace_size", &ExpertRowsWorkspaceSize,
        nb::arg("num_pairs"), nb::arg("local_experts"));
  m.def(
      "low_latency_bytes",
      [](int64_t num_ranks, int64_t max_tokens, int64_t hidden,
         int64_t element_bytes) {
        return LowLatencyLayout(num_ranks, max_tokens, hidden, element_bytes)
            .size();
      },
      nb::arg("num_ranks"), nb::arg("max_tokens"), nb::arg("hidden"),
      nb::arg("element_bytes"));
  m.def(
      "plan_dispatch_fits",
      [](int32_t num_ranks, int64_t num_tokens, int32_t top_k,
         int32_t num_experts, const std::vector<int64_t>& row_bytes) {
        return PlanDispatchFits(num_ranks, num_tokens, top_k, num_experts,
                                row_bytes.data(), row_bytes.size());
      },
      nb::arg("num_ranks"), nb::arg("num_tokens"), nb::arg("top_k"),
      nb::arg("num_experts"), nb::arg("row_bytes"));
  // What backend "cuda" numbers its call sites with; here for tests.
  nb::enum_<SlotKind>(m, "SlotKind")
      .value("PLAN", SlotKind::kPlan)
      .value("ROWS", SlotKind::kRows)
      .value("FLIGHT", SlotKind::kFlight)
      .value("NONE", SlotKind::kNone);
  nb::class_<ControlSlots>(m, "ControlSlots")
      .def(nb::init<>())
      .def_static("begin_program", &ControlSlots::BeginProgram)
      .def(
          "take",
          [](ControlSlots& slots, SlotKind kind, uint32_t number,
             uint32_t channel) {
            const ControlSlots::Site site = slots.Take(kind, number, channel);
            return std::make_tuple(site.slot, site.instance);
          },
          nb::arg("kind"), nb::arg("number"), nb::arg("channel"));
  m.def("plan_workspace_size", &PlanWorkspaceSize, nb::arg("num_ranks"),
        nb::arg("num_experts"));
}

}  // namespace
}  // namespace jax_ep

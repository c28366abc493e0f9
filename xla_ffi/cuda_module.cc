// jax_ep._cuda: handlers and communicators of the CUDA backend for Python.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cc/current_device.h"
#include "cc/handshake/control_slots.h"
#include "cc/handshake/mesh_place.h"
#include "cc/handshake/peer_view.h"
#include "cc/handshake/wait_limits.h"
#include "cc/handshake/wait_notes.h"
#include "cc/layout/control.h"
#include "cc/layout/limits.h"
#include "cc/nodes/nccl.h"
#include "cc/nodes/nccl_wire.h"
#include "cc/releases.h"
#include "cc/self_test.h"
#include "nanobind/nanobind.h"
#include "nanobind/stl/pair.h"
#include "nanobind/stl/string.h"
#include "nanobind/stl/tuple.h"
#include "nanobind/stl/vector.h"
#include "xla_ffi/cuda_calls.h"
#include "xla_ffi/module.h"
#include "xla_ffi/registry.h"

namespace jax_ep {
namespace {

namespace nb = nanobind;

// Multiprocessors that an operation uses; asked_for is 0 where nobody asked.
// Then a fixed share: 24 of an H200's 132 fill its link and
// leave the rest to the experts.
int32_t NumSms(int32_t ordinal, int32_t asked_for) {
  if (asked_for > 0) return asked_for;
  int count = 0;
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, ordinal);
  return std::max(1, count * 2 / 11);
}

// Set-up writes tables of regions from Python.
static_assert(sizeof(Region) == 3 * sizeof(uint64_t));

// (begin, bytes)
using Range = std::pair<uint64_t, uint64_t>;

// One local device. `control` holds the control memory of each rank of its
// group as the device sees it. What follows serves groups of several processes:
// `same_process` are the ranks of this process, `regions` is the address of the
// table in PeerView, 0 in other groups.
struct Place {
  int32_t ordinal;
  int32_t rank;
  Mesh mesh;
  std::vector<uint64_t> control;
  std::vector<int32_t> same_process;
  uint64_t regions;
  std::vector<Range> exported;
};

// The communicator takes over what is mapped and allocated.
struct CommunicatorArguments {
  int32_t num_ranks;
  int32_t num_sms;
  double timeout_s;
  double warn_after_s;
  int32_t num_channels;
  int64_t staging_bytes;
  std::vector<Place> places;
  bool has_other_processes;
  std::vector<Range> mapped;
  std::vector<uint64_t> allocated;
};

std::vector<CudaCommunicator::Range> Ranges(const std::vector<Range>& from) {
  std::vector<CudaCommunicator::Range> to;
  for (const auto& [begin, bytes] : from) to.push_back({begin, bytes});
  return to;
}

PeerView ViewOf(const CommunicatorArguments& from, const Place& place) {
  PeerView view = {};
  view.rank = place.rank;
  view.num_ranks = from.num_ranks;
  view.num_sms = NumSms(place.ordinal, from.num_sms);
  view.has_bulk = HasBulk(place.ordinal);
  view.timeout_ns = static_cast<uint64_t>(from.timeout_s * 1e9);
  view.warn_ns =
      std::min(view.timeout_ns, static_cast<uint64_t>(from.warn_after_s * 1e9));
  view.mesh = MeshPlaceOf(place.mesh);
  for (int32_t peer = 0; peer < from.num_ranks; ++peer) {
    view.control[peer] = reinterpret_cast<std::byte*>(place.control[peer]);
  }
  for (const int32_t rank : place.same_process) view.same_process.Add(rank);
  if (place.regions != 0) {
    view.regions = reinterpret_cast<const Region*>(place.regions);
    view.num_channels = from.num_channels;
    view.staging_bytes = from.staging_bytes;
  }
  return view;
}

// Python hands these over: what does not fit a PeerView is refused.
void CheckPlace(const Place& place, int32_t num_ranks) {
  const auto is_rank = [&](int32_t r) { return 0 <= r && r < num_ranks; };
  if (num_ranks > kMaxRanks) {
    throw std::invalid_argument("jax_ep: more ranks than a node may have");
  }
  if (place.control.size() != static_cast<size_t>(num_ranks)) {
    throw std::invalid_argument("jax_ep: control memory of too few ranks");
  }
  if (!is_rank(place.rank) || !std::all_of(place.same_process.begin(),
                                           place.same_process.end(), is_rank)) {
    throw std::invalid_argument("jax_ep: a rank that the group does not have");
  }
}

void Check(const char* call, cudaError_t status) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string("jax_ep: ") + call +
                           " failed: " + cudaGetErrorString(status));
}

// Memory in which kernels say that they wait long. What it takes is the
// communicator's at once.
void MakeWaitNotes(const CommunicatorArguments& from,
                   CudaCommunicator& communicator) {
  if (communicator.views.empty()) return;
  const size_t ranks = from.num_ranks;
  const OnDevice current(communicator.views.begin()->first);
  Check("cudaSetDevice", current.status());
  void* memory = nullptr;
  const size_t bytes = communicator.views.size() * ranks * sizeof(WaitNote);
  Check("cudaHostAlloc",
        cudaHostAlloc(&memory, bytes,
                      cudaHostAllocMapped | cudaHostAllocPortable));
  std::memset(memory, 0, bytes);
  WaitNote* next = communicator.notes = static_cast<WaitNote*>(memory);
  const WaitLimits limits = {.warn_after = Duration(from.warn_after_s),
                             .timeout = Duration(from.timeout_s)};
  for (auto& [ordinal, view] : communicator.views) {
    Check("cudaSetDevice", cudaSetDevice(ordinal));
    Check("cudaHostGetDevicePointer",
          cudaHostGetDevicePointer(&memory, next, 0));
    view.notes = static_cast<WaitNote*>(memory);
    Check("cudaMalloc", cudaMalloc(&memory, ranks * sizeof(uint64_t)));
    communicator.allocated.push_back(reinterpret_cast<uint64_t>(memory));
    view.noted = static_cast<uint64_t*>(memory);
    const std::vector<uint64_t> zeros(ranks);
    Check("cudaMemcpy",
          cudaMemcpy(memory, zeros.data(), ranks * sizeof(uint64_t),
                     cudaMemcpyHostToDevice));
    communicator.note_tables.push_back(
        WaitNotes::Get().Add(next, view.rank, from.num_ranks, limits));
    next += ranks;
  }
}

void CreateCommunicator(int64_t id, const CommunicatorArguments& from) {
  WaitNotes::Get();  // its thread is started, or this is an error
  auto communicator = MakeReleased<CudaCommunicator>();
  for (const Place& place : from.places) {
    CheckPlace(place, from.num_ranks);
    communicator->views[place.ordinal] = ViewOf(from, place);
    communicator->exported[place.ordinal] = Ranges(place.exported);
  }
  MakeWaitNotes(from, *communicator);
  // Nothing fails from here on: the caller keeps what an error leaves behind.
  communicator->has_other_processes = from.has_other_processes;
  communicator->mapped = Ranges(from.mapped);
  communicator->allocated.insert(communicator->allocated.end(),
                                 from.allocated.begin(), from.allocated.end());
  Registry<CudaCommunicator>::Get().Add(id, std::move(communicator));
}

// (version, problem): NCCL's, or why there is none.
std::pair<int, std::string> LoadNccl(const std::vector<std::string>& files) {
  std::string problem;
  const nccl::Functions* const nccl = nccl::Load(files, &problem);
  int version = 0;
  if (nccl != nullptr) nccl->get_version(&version);
  return {version, problem};
}

// The name of a new rail; "" where NCCL cannot make one.
nb::bytes NewRail() {
  nccl::UniqueId id;
  if (nccl::Loaded()->get_unique_id(&id) != nccl::kSuccess) {
    return nb::bytes("", 0);
  }
  return nb::bytes(id.bytes, sizeof(id.bytes));
}

// (ordinal, rank, node, number of nodes, its place on the mesh, name of the
// rail)
using RailPlace =
    std::tuple<int32_t, int32_t, int32_t, int32_t, Mesh, nb::bytes>;

// Blocks until every rank of the rails has come. What went wrong, else "".
std::string ConnectRails(int64_t id, const std::vector<RailPlace>& from,
                         double setup_timeout_s, double timeout_s,
                         double warn_after_s) {
  std::vector<WirePlace> places;
  for (const auto& [ordinal, rank, node, num_nodes, mesh, name] : from) {
    WirePlace place = {ordinal, rank, node, num_nodes, MeshPlaceOf(mesh), {}};
    if (name.size() != sizeof(place.id.bytes)) {
      throw std::invalid_argument("jax_ep: not the name of a rail");
    }
    std::memcpy(place.id.bytes, name.c_str(), sizeof(place.id.bytes));
    places.push_back(place);
  }
  const nb::gil_scoped_release released;
  auto rails = MakeReleased<NcclRails>();
  const std::string problem = rails->Connect(
      places, Duration(setup_timeout_s),
      {.warn_after = Duration(warn_after_s), .timeout = Duration(timeout_s)});
  if (problem.empty()) Registry<NcclRails>::Get().Add(id, std::move(rails));
  return problem;
}

NB_MODULE(_cuda, m) {
  DefineShared(m);
  m.def("num_handler_calls", &NumHandlerCalls);
  m.def("control_bytes",
        [](int32_t num_ranks) { return ControlLayout(num_ranks).size(); });
  m.def("self_test", &SelfTest, nb::arg("ordinal"),
        nb::call_guard<nb::gil_scoped_release>());
  m.attr("architectures") = Architectures();
  m.attr("max_regions") = kMaxRegions;
  m.def("num_sms", &NumSms, nb::arg("ordinal"), nb::arg("asked_for"));
  m.def("begin_program", &ControlSlots::BeginProgram);
  nb::class_<Place>(m, "Place")
      .def(nb::init<int32_t, int32_t, Mesh, std::vector<uint64_t>,
                    std::vector<int32_t>, uint64_t, std::vector<Range>>(),
           nb::arg("ordinal"), nb::arg("rank"), nb::arg("mesh"),
           nb::arg("control"), nb::arg("same_process"), nb::arg("regions"),
           nb::arg("exported"));
  nb::class_<CommunicatorArguments>(m, "CommunicatorArguments")
      .def(nb::init<int32_t, int32_t, double, double, int32_t, int64_t,
                    std::vector<Place>, bool, std::vector<Range>,
                    std::vector<uint64_t>>(),
           nb::arg("num_ranks"), nb::arg("num_sms"), nb::arg("timeout_s"),
           nb::arg("warn_after_s"), nb::arg("num_channels"),
           nb::arg("staging_bytes"), nb::arg("places"),
           nb::arg("has_other_processes"), nb::arg("mapped"),
           nb::arg("allocated"));
  m.def("create_communicator", &CreateCommunicator, nb::arg("id"),
        nb::arg("arguments"));
  m.def("nccl_version_name", &nccl::VersionName, nb::arg("version"));
  m.def("load_nccl", &LoadNccl, nb::arg("files"));
  m.def("new_rail", &NewRail);
  m.def("connect_rails", &ConnectRails, nb::arg("id"), nb::arg("places"),
        nb::arg("setup_timeout_s"), nb::arg("timeout_s"),
        nb::arg("warn_after_s"));
  m.def(
      "release_rails",
      [](int64_t id) { Registry<NcclRails>::Get().Remove(id); },
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "release_communicator",
      [](int64_t id) { Registry<CudaCommunicator>::Get().Remove(id); },
      nb::call_guard<nb::gil_scoped_release>());
  m.def("wait_for_releases", &Releases::Wait,
        nb::call_guard<nb::gil_scoped_release>());
  nb::module_::import_("atexit").attr("register")(
      nb::cpp_function(&Releases::Stop));
}

}  // namespace
}  // namespace jax_ep

// A Register request as it comes from the wire: conversion, validation, routing, planning, and the
// joining of ranks with their slices. Whatever is refused must leave the registry as it was.
#include <string>
#include <utility>

#include "google/protobuf/stubs/logging.h"
#include "muond/v1/optimizer.pb.h"
#include "muond/v1/types.pb.h"
#include "proto/check.h"
#include "proto/convert.h"
#include "proto/version.h"
#include "server/registry/registry.h"
#include "tests/fuzz/input.h"

namespace muond::fuzz {
namespace {

// Small, so that time goes into rules and not into size; the limits themselves are under test.
const RegistryLimits kLimits{.parameters_max = 64,
                             .tensor_bytes_max = std::int64_t{1} << 30,
                             .run_bytes_max = std::int64_t{1} << 34,
                             .world_size_max = 8,
                             .slices_per_rank_max = 256};

void Register(const v1::RegisterRequest& request, int daemons, int daemon) {
  CheckVersions("0.1.0", request.version(), "client").IgnoreError();
  auto spec = FromProto(request.run());
  const auto slices = SlicesFromProto(request.slices());
  if (!spec.ok() || !slices.ok()) return;
  // What was understood must survive its way back.
  const v1::Run back = ToProto(*spec);
  MUOND_CHECK(FromProto(back).ok(), "a run that was read can be told and read again");
  Placement placement;
  placement.plan.devices_per_daemon.assign(daemons, 1);
  placement.daemon = daemon;
  auto registry = Registry::Create(*std::move(spec), kLimits, placement);
  if (!registry.ok()) return;
  MUOND_CHECK(registry->run_bytes() >= 0 && registry->state_bytes() >= 0, "sizes don't wrap");
  const auto joined_before = registry->joined_ranks();
  const auto joined = registry->Join(request.rank(), "s", *slices);
  if (!joined.ok()) {
    MUOND_CHECK(registry->joined_ranks() == joined_before, "a refused rank has not joined");
    return;
  }
  const auto again = registry->Join(request.rank(), "s", *slices);
  MUOND_CHECK(again.ok() && again->rejoined, "the same again is a rejoin");
  MUOND_CHECK(!registry->Join(request.rank(), "other", *slices).ok(), "another session is not");
  for (int p = 0; p < static_cast<int>(registry->spec().parameters.size()); ++p) {
    MUOND_CHECK(registry->ElementsHere(p) >= 0, "elements don't wrap");
    for (const Shard& shard : registry->ShardsHere(p)) {
      MUOND_CHECK(shard.first >= 0 && (shard.elements > 0 ||
                                       registry->routing().parameters[p].elements == 0),
                  "a shard is a range, without elements only where the parameter has none");
    }
  }
}

}  // namespace
}  // namespace muond::fuzz

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  // It would say of each text that is no UTF-8 that it is none.
  [[maybe_unused]] static const auto former = google::protobuf::SetLogHandler(nullptr);
  muond::fuzz::Input input(data, size);
  const int daemons = 1 + input.Below(3);
  const int daemon = input.Below(daemons);
  const std::string_view bytes = input.Rest();
  muond::v1::RegisterRequest request;
  if (!request.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return 0;
  muond::fuzz::Register(request, daemons, daemon);
  return 0;
}

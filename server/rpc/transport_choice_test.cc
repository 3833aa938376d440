#include "server/rpc/transport_choice.h"

#include "gtest/gtest.h"
#include "nccl/fake.h"
#include "server/transport/pair_table.h"

namespace muond {
namespace {

const TransportFacts kFacts{.peer = "unix:",
                            .boot_id = "this-host",
                            .arena_socket = "/run/muond/muond.sock.arena",
                            .why_no_arenas = ""};

v1::RegisterRequest Trainer(const std::string& wanted = "", const std::string& host = "this-host",
                            bool knows_arena = true) {
  v1::RegisterRequest request;
  request.mutable_run()->set_name("r");
  request.set_transport(wanted);
  request.set_boot_id(host);
  if (knows_arena) request.add_transports("arena");
  return request;
}

TransportChoice Choose(const TransportFacts& facts, const v1::RegisterRequest& request) {
  auto choice = ChooseTransport(facts, request);
  EXPECT_TRUE(choice.ok()) << choice.status();
  return choice.ok() ? *choice : TransportChoice{};
}

TEST(TransportChoice, OneHostGetsAnArenaAlsoOverTcp) {
  TransportFacts facts = kFacts;
  for (const char* peer : {"unix:", "ipv4:127.0.0.1:5"}) {
    facts.peer = peer;
    const TransportChoice choice = Choose(facts, Trainer());
    EXPECT_EQ(choice.path, TransportPath::kArena);
    EXPECT_EQ(choice.reason, "trainer and daemon are on one host");
    EXPECT_FALSE(choice.fallback);
  }
}

TEST(TransportChoice, OneProcessNeedsNeither) {
  TransportFacts facts = kFacts;
  facts.peer = "unknown";
  EXPECT_EQ(Choose(facts, Trainer()).path, TransportPath::kInProcess);
}

// A trainer with a GPU, and a daemon on the one with this name.
struct Gpus {
  explicit Gpus(const std::string& daemon = "GPU-a")
      : pairs(NcclPlatform{&nccl::fake::TheLibrary(), nccl::fake::MakeDevice(daemon)}, {}) {
    memory = kernels::MakeHostDeviceMemory(daemon);
    facts.pid_namespace = "pid:[1]";
    facts.gpus = {memory.get()};
    facts.host_backend = false;
    request.set_gpu("GPU-a");
    facts.pairs = &pairs;
    request.set_nccl_version(nccl::fake::TheLibrary().version);
    request.set_pid_namespace("pid:[1]");
    for (const char* path : {"cuda-ipc", "nccl", "pointer"}) request.add_transports(path);
  }
  std::unique_ptr<kernels::DeviceMemory> memory;
  PairTable pairs;
  TransportFacts facts = kFacts;
  v1::RegisterRequest request = Trainer();
};

TEST(TransportChoice, PointerThenOneGpuThenNcclThenOneHostThenGrpc) {
  Gpus in_process;
  in_process.facts.peer = "inproc";
  EXPECT_EQ(Choose(in_process.facts, in_process.request).path, TransportPath::kPointer);
  Gpus one;
  const TransportChoice ipc = Choose(one.facts, one.request);
  EXPECT_EQ(ipc.path, TransportPath::kCudaIpc);
  EXPECT_EQ(ipc.reason, "trainer and daemon are on one GPU");
  ASSERT_EQ(ipc.offers.size(), 5u);
  EXPECT_EQ(ipc.offers[0].first, "pointer");
  EXPECT_EQ(ipc.offers[1].second, "");
  Gpus two("GPU-b");
  EXPECT_EQ(Choose(two.facts, two.request).path, TransportPath::kNccl);
  two.request.set_nccl_version(22800);  // another minor version
  const TransportChoice host = Choose(two.facts, two.request);
  EXPECT_EQ(host.path, TransportPath::kArena);
  EXPECT_EQ(host.fallback, TransportFallback::kOtherGpu);
  EXPECT_EQ(host.instead_of, TransportPath::kCudaIpc);
  two.request.set_boot_id("another");
  EXPECT_EQ(Choose(two.facts, two.request).path, TransportPath::kGrpc);
}

TEST(TransportChoice, OfTwoProcessNamespacesNoneCanOpenTheOthersGpuMemory) {
  Gpus gpus;
  gpus.request.set_pid_namespace("pid:[2]");
  const TransportChoice choice = Choose(gpus.facts, gpus.request);
  EXPECT_EQ(choice.path, TransportPath::kArena);
  EXPECT_EQ(choice.fallback, TransportFallback::kNamespace);
  gpus.request.set_transport("cuda-ipc");
  const auto refused = ChooseTransport(gpus.facts, gpus.request);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(refused.status().message().find("process namespaces"), std::string::npos);
}

TEST(TransportChoice, WhatNoDaemonCouldGiveIsAnInvalidArgument) {
  Gpus gpus;
  gpus.request.set_transport("nccl");  // on one GPU
  const auto nccl = ChooseTransport(gpus.facts, gpus.request);
  EXPECT_EQ(nccl.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(nccl.status().message().find("NCCL refuses two ranks"), std::string::npos);
  gpus.request.set_transport("pointer");
  EXPECT_EQ(ChooseTransport(gpus.facts, gpus.request).status().code(),
            absl::StatusCode::kInvalidArgument);
  gpus.request.set_transport("cuda-ipc");
  gpus.facts.peer = "inproc";
  const auto own = ChooseTransport(gpus.facts, gpus.request);
  EXPECT_EQ(own.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(own.status().message().find("pointers serve there"), std::string::npos);
}

TEST(TransportChoice, APointerIntoTheHostIsNoneForADaemonOnAGpu) {
  Gpus gpus;
  gpus.facts.peer = "inproc";
  gpus.request.clear_gpu();
  EXPECT_EQ(Choose(gpus.facts, gpus.request).path, TransportPath::kInProcess);
  gpus.facts.host_backend = true;
  gpus.facts.gpus.clear();
  EXPECT_EQ(Choose(gpus.facts, gpus.request).path, TransportPath::kPointer);
}

TEST(TransportChoice, WhatStandsInTheWayIsSaidAndCountedWhereItIsAFallback) {
  const TransportChoice other_host = Choose(kFacts, Trainer("", "another"));
  EXPECT_EQ(other_host.path, TransportPath::kGrpc);
  EXPECT_EQ(other_host.reason, "trainer and daemon are on different hosts");
  EXPECT_FALSE(other_host.fallback);

  const TransportChoice old_client = Choose(kFacts, Trainer("", "", false));
  EXPECT_EQ(old_client.path, TransportPath::kGrpc);
  EXPECT_EQ(old_client.fallback, TransportFallback::kNotOffered);

  TransportFacts facts = kFacts;
  facts.arena_socket.clear();
  facts.why_no_arenas = "arenas are off";
  const TransportChoice off = Choose(facts, Trainer());
  EXPECT_EQ(off.path, TransportPath::kGrpc);
  EXPECT_EQ(off.reason, "same host, but arenas are off");
  EXPECT_EQ(off.fallback, TransportFallback::kNoSocket);
}

TEST(TransportChoice, AHostThatCantBeToldIsAnother) {
  TransportFacts facts = kFacts;
  facts.boot_id.clear();
  EXPECT_EQ(Choose(facts, Trainer("", "")).path, TransportPath::kGrpc);
}

TEST(TransportChoice, AForcedPathIsTakenOrRefusedWithTheReason) {
  EXPECT_EQ(Choose(kFacts, Trainer("grpc")).path, TransportPath::kGrpc);
  EXPECT_EQ(Choose(kFacts, Trainer("arena")).path, TransportPath::kArena);
  const auto refused = ChooseTransport(kFacts, Trainer("arena", "another"));
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(refused.status().message(),
            "run \"r\": transport \"arena\": trainer and daemon are on different hosts");
  EXPECT_EQ(ChooseTransport(kFacts, Trainer("carrier pigeon")).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace muond

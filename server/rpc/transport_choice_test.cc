#include "server/rpc/transport_choice.h"

#include "gtest/gtest.h"

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

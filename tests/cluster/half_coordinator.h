// Plays a daemon that raises a run's generation and dies on the way.
#pragma once

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "grpcpp/grpcpp.h"
#include "proto/status.h"
#include "server/cluster/peers.h"
#include "tests/support/cluster_fixture.h"

namespace muond::cluster {

// A coordinator that says only what a test has it say, in the name of one of the daemons.
class HalfCoordinator {
 public:
  HalfCoordinator(TestRun& run, int self)
      : peers_({.daemons = DaemonsOf(run), .self = self}, absl::Seconds(1)),
        introduction_(peers_.Introduction(
            "run", run.session().registered().plan_hash() + " of 1 devices a daemon")) {}

  absl::Status Prepare(int daemon, std::int64_t generation, bool reinitialize = false,
                       const std::string& adopt = "") {
    grpc::ClientContext context;
    SetDeadline(context);
    v1::PrepareRequest request;
    *request.mutable_peer() = introduction_;
    request.set_generation(generation);
    request.set_reinitialize(reinitialize);
    request.set_adopt(adopt);
    v1::PrepareReply reply;
    return FromGrpc(peers_.stub(daemon).Prepare(&context, request, &reply));
  }
  absl::Status Reinitialize(int daemon, std::int64_t generation, std::int64_t step) {
    v1::RaiseRequest request;
    request.set_generation(generation);
    request.set_reinitialize(true);
    request.set_resume_step(step);
    return Raise(daemon, std::move(request));
  }
  // Of daemons that others, which had lost theirs, have got their state back.
  absl::Status Recover(int daemon, std::int64_t generation) {
    v1::RaiseRequest request;
    request.set_generation(generation);
    request.set_recover(true);
    return Raise(daemon, std::move(request));
  }
  absl::Status Adopt(int daemon, std::int64_t generation, const std::string& addition) {
    v1::RaiseRequest request;
    request.set_generation(generation);
    request.set_adopt(addition);
    return Raise(daemon, std::move(request));
  }

  // Whether the daemon, not the one that this plays, knows the votes of all for a step: its verdict
  // has fallen there then.
  bool KnowsAllVotes(int daemon, std::int64_t step) {
    grpc::ClientContext context;
    SetDeadline(context);
    v1::VoteRequest request;
    *request.mutable_peer() = introduction_;
    request.set_step(step);
    v1::VoteReply reply;
    const absl::Status asked = FromGrpc(peers_.stub(daemon).Vote(&context, request, &reply));
    return asked.ok() && reply.votes_size() == peers_.count();
  }

 private:
  absl::Status Raise(int daemon, v1::RaiseRequest request) {
    grpc::ClientContext context;
    SetDeadline(context);
    *request.mutable_peer() = introduction_;
    v1::RaiseReply reply;
    return FromGrpc(peers_.stub(daemon).Raise(&context, request, &reply));
  }
  // As they call themselves.
  static std::vector<std::string> DaemonsOf(TestRun& run) {
    const auto& daemons = run.session().registered().daemons();
    return {daemons.begin(), daemons.end()};
  }
  static void SetDeadline(grpc::ClientContext& context) {
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(5));
  }
  Peers peers_;
  const v1::PeerRun introduction_;
};

}  // namespace muond::cluster

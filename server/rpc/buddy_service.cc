#include "server/rpc/buddy_service.h"

#include "absl/strings/str_format.h"
#include "proto/check.h"
#include "proto/version.h"
#include "server/rpc/answer.h"

namespace muond {
namespace {

template <typename Reply>
grpc::ServerUnaryReactor* AnswerWith(grpc::CallbackServerContext* context, Run* run,
                                     absl::StatusOr<Reply> done, Reply* reply) {
  if (!done.ok()) return AnswerNow(context, done.status(), run);
  *reply = *std::move(done);
  return AnswerNow(context, absl::OkStatus(), nullptr);
}

}  // namespace

absl::StatusOr<std::shared_ptr<Run>> BuddyService::Find(const v1::PeerRun& peer) const {
  // As PeerService: to a daemon of another version the run may be unknown, too.
  MUOND_RETURN_IF_ERROR(CheckVersions(
      OwnVersion(), peer.version(),
      absl::StrFormat("run \"%s\": daemon %d of its list", peer.run(), peer.daemon())));
  MUOND_ASSIGN_OR_RETURN(std::shared_ptr<Run> run, runs_->Find(peer.run()));
  const int daemon = static_cast<int>(peer.daemon());
  const absl::Status exact = run->CheckPeer(daemon, peer.agreement(), /*exact=*/true);
  if (exact.ok()) return run;
  // Parameters are being added, and one of the two has them before the other: ask again.
  const bool soon = run->CheckPeer(daemon, peer.agreement(), /*exact=*/false).ok();
  return soon ? absl::AbortedError(exact.message()) : exact;
}

grpc::ServerUnaryReactor* BuddyService::Put(grpc::CallbackServerContext* context,
                                            const v1::BuddyPutRequest* request,
                                            v1::BuddyPutReply* reply) {
  const auto run = Find(request->peer());
  if (!run.ok()) return AnswerNow(context, run.status(), nullptr);
  return AnswerWith(context, run->get(), (*run)->BuddyPut(*request), reply);
}

grpc::ServerUnaryReactor* BuddyService::Index(grpc::CallbackServerContext* context,
                                              const v1::BuddyIndexRequest* request,
                                              v1::BuddyIndexReply* reply) {
  const auto run = Find(request->peer());
  if (!run.ok()) return AnswerNow(context, run.status(), nullptr);
  return AnswerWith(context, run->get(), (*run)->BuddyIndex(*request), reply);
}

grpc::ServerUnaryReactor* BuddyService::Read(grpc::CallbackServerContext* context,
                                             const v1::BuddyReadRequest* request,
                                             v1::BuddyReadReply* reply) {
  const auto run = Find(request->peer());
  if (!run.ok()) return AnswerNow(context, run.status(), nullptr);
  return AnswerWith(context, run->get(), (*run)->BuddyRead(*request), reply);
}

grpc::ServerUnaryReactor* BuddyService::Recover(grpc::CallbackServerContext* context,
                                                const v1::BuddyRecoverRequest* request,
                                                v1::BuddyRecoverReply* reply) {
  const auto run = Find(request->peer());
  if (!run.ok()) return AnswerNow(context, run.status(), nullptr);
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  executor_->Post([context, request, reply, reactor, run = *run] {
    const auto done = run->StageFromBuddy(request->version(), request->lineage());
    if (done.ok()) *reply = *done;
    reactor->Finish(Answer(context, done.status(), run.get()));
  });
  return reactor;
}

}  // namespace muond

#include "tests/simulation/messages.h"

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace muond::simulation {
namespace {

std::string Names(const std::vector<std::string>& names) { return absl::StrJoin(names, ","); }

std::string Votes(const std::vector<CastVote>& votes) {
  return absl::StrJoin(votes, " ", [](std::string* out, const CastVote& cast) {
    out->append(absl::StrFormat("%d:%s", cast.daemon, ToString(cast.vote)));
  });
}

std::string Text(const BeginCall& call) {
  return absl::StrFormat("begin rank %d g%d s%d scale %g micro %d%s", call.rank, call.generation,
                         call.begin.step, call.begin.loss_scale, call.begin.micro_batches,
                         call.begin.muon.empty() ? "" : " new lr");
}
std::string Text(const PushCall& call) {
  return absl::StrFormat("push rank %d g%d s%d p%d slice %d micro %d content %d/%d", call.id.rank,
                         call.generation, call.step, call.id.parameter, call.id.slice,
                         call.id.micro_batch, call.content.lineage, call.content.number);
}
std::string Text(const FinishCall& call) {
  return absl::StrFormat("finish rank %d g%d s%d absent [%s]", call.rank, call.generation,
                         call.step, Names(call.absent));
}
std::string Text(const SkipCall& call) {
  return absl::StrFormat("skip rank %d g%d s%d %s scale %g", call.rank, call.generation, call.step,
                         std::string(SkipCauseName(call.cause)), call.loss_scale);
}
std::string Text(const CancelCall& call) { return absl::StrFormat("cancel #%d", call.call); }
std::string Text(const JoinCall&) { return "join"; }
std::string Text(const NewGenerationCall& call) {
  return absl::StrFormat("new generation above g%d%s%s", call.above,
                         call.reinitialize ? ", reinitialize" : "", call.grow ? ", grow" : "");
}
std::string Text(const VotesCall& call) {
  return absl::StrFormat("votes for s%d: %s", call.step, Votes(call.votes));
}
std::string Text(const PrepareCall& call) {
  return absl::StrFormat("prepare g%d", call.generation);
}
std::string Text(const RaiseCall& call) {
  return absl::StrFormat(
      "raise g%d settled [%s]%s%s", call.generation, Votes(call.settled),
      call.reinitialize ? absl::StrFormat(" reinitialize at s%d", call.resume_step) : "",
      call.grow ? " grow" : "");
}
std::string Text(const Answer& answer) {
  std::string text = absl::StrFormat("answer %s at g%d s%d%s%s", answer.status.ToString(),
                                     answer.position.generation, answer.position.next_step,
                                     answer.position.usable ? "" : " unusable",
                                     answer.position.committing ? " committing" : "");
  if (answer.outcome) {
    absl::StrAppendFormat(&text, " outcome s%d %s", answer.outcome->step,
                          answer.outcome->applied ? "applied" : "skipped");
  }
  if (!answer.votes.empty()) absl::StrAppendFormat(&text, " votes %s", Votes(answer.votes));
  return text;
}

}  // namespace

std::string ToString(const Vote& vote) {
  return absl::StrFormat("g%d/s%d/%04x", vote.generation, vote.step, vote.terms & 0xffff);
}

std::string ToString(const Message& message) {
  return absl::StrFormat("%d -> %d #%d %s", message.from, message.to, message.call,
                         std::visit([](const auto& body) { return Text(body); }, message.body));
}

}  // namespace muond::simulation

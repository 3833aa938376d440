// Digests: of what this daemon owns, and of the whole run.
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "server/cluster/ask_hashes.h"
#include "server/run/run.h"
#include "server/run/shard_hashes_message.h"

namespace muond {
namespace {

constexpr absl::Duration kAskTimeout = absl::Seconds(10);
constexpr absl::Duration kPause = absl::Milliseconds(50);
// Tries to find all daemons at one version while steps go on.
constexpr int kTries = 20;

// Step counter, loss-scaler state and generation: what a skipped step does change.
std::string ControlDigest(const StepMachine* machine) {
  if (machine == nullptr) return Digest128("");
  const LossScalerState& scaler = machine->scaler().state();
  struct {
    std::int64_t generation, next_step, good_steps, hysteresis_left, overflows_at_minimum;
    double scale;
  } control = {machine->generation(),  machine->next_step(),        scaler.good_steps,
               scaler.hysteresis_left, scaler.overflows_at_minimum, scaler.scale};
  return Digest128({reinterpret_cast<const char*>(&control), sizeof(control)});
}

}  // namespace

void Run::HashShards(std::int64_t version,
                     std::function<void(absl::StatusOr<std::vector<ShardHashes>>)> done) {
  HashState([self = shared_from_this(), version, done](absl::StatusOr<HashedState> state) {
    if (!state.ok()) return done(state.status());
    if (state->digest.version != version) {
      return done(absl::FailedPreconditionError(
          absl::StrFormat("run \"%s\": hashes of version %d: this daemon is at version %d",
                          self->name(), version, state->digest.version)));
    }
    done(std::move(state->shards));
  });
}

void Run::HashState(std::function<void(absl::StatusOr<HashedState>)> done) {
  MutexLock lock(mutex_);
  engines_->HashShards([self = shared_from_this(),
                        done](absl::StatusOr<std::vector<ShardHashes>> hashes) {
    if (!hashes.ok()) return done(hashes.status());
    HashedState state{.shards = *std::move(hashes)};
    {
      // A commit that was posted before is concluded by now, and none that was posted later is: the
      // version is that of the bytes.
      MutexLock lock(self->mutex_);
      state.digest.control = ControlDigest(self->machine_.get());
      state.digest.version = self->machine_ == nullptr ? 0 : self->machine_->version();
    }
    done(std::move(state));
  });
}

void Run::Digest(bool per_parameter, std::function<void(absl::StatusOr<DigestSnapshot>)> done) {
  DigestTry(per_parameter, kTries, std::move(done));
}

void Run::DigestTry(bool per_parameter, int tries,
                    std::function<void(absl::StatusOr<DigestSnapshot>)> done) {
  HashState([self = shared_from_this(), per_parameter, tries,
             done](absl::StatusOr<HashedState> state) {
    if (!state.ok()) return done(state.status());
    if (self->context_.peers->count() == 1) {
      return done(self->DigestOf(*std::move(state), per_parameter));
    }
    // Asking waits for others: not on a thread that they may wait for.
    self->context_.peer_executor->Post([self, per_parameter, tries, done,
                                        state = *std::move(state)]() mutable {
      const auto others =
          AskStateHashes(*self->context_.peers, self->name(), self->PlanName(),
                         state.digest.version, kAskTimeout);
      if (absl::IsFailedPrecondition(others.status()) && tries > 1) {
        absl::SleepFor(kPause);
        return self->DigestTry(per_parameter, tries - 1, done);
      }
      if (!others.ok()) return done(others.status());
      for (const v1::StateHashesReply& reply : *others) AppendFromProto(reply, state.shards);
      done(self->DigestOf(std::move(state), per_parameter));
    });
  });
}

DigestSnapshot Run::DigestOf(HashedState state, bool per_parameter) const {
  DigestSnapshot digest = std::move(state.digest);
  digest.tensor = TensorDigest(spec(), state.shards);
  if (per_parameter) digest.parameters = ParameterDigests(spec(), std::move(state.shards));
  return digest;
}

}  // namespace muond

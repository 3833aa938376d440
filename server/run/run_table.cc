#include "server/run/run_table.h"

#include <utility>

#include "absl/strings/str_format.h"
#include "proto/check.h"

namespace muond {

// Null when there is no such run and one may be made.
absl::StatusOr<std::shared_ptr<Run>> RunTable::FindForJoin(const std::string& name) const {
  MutexLock lock(mutex_);
  if (!draining_.ok()) return draining_;
  if (const auto found = runs_.find(name); found != runs_.end()) return found->second;
  if (refuse_new_) {
    return absl::UnavailableError(absl::StrFormat(
        "run \"%s\": the daemon takes no new runs: an operator is draining it", name));
  }
  if (static_cast<std::int64_t>(runs_.size()) < runs_max_) return nullptr;
  return absl::ResourceExhaustedError(absl::StrFormat(
      "run \"%s\": the daemon holds %d runs already, its limit (--max-runs)", name, runs_.size()));
}

absl::StatusOr<RunTable::Joined> RunTable::Join(const RunSpec& spec, std::int64_t rank,
                                                const std::string& session,
                                                const RankSlices& slices,
                                                const std::string& tenant) {
  MutexLock joining(creation_);
  {
    MutexLock lock(mutex_);
    MUOND_RETURN_IF_ERROR(CheckTenant(spec.name, tenant));
  }
  MUOND_ASSIGN_OR_RETURN(std::shared_ptr<Run> run, FindForJoin(spec.name));
  const bool made = run == nullptr;
  if (made) {
    MUOND_ASSIGN_OR_RETURN(run, Run::Create(spec, context_));
    MUOND_RETURN_IF_ERROR(run->LearnFromPeers());
    if (context_.run_made) context_.run_made(*run);
  }
  MUOND_ASSIGN_OR_RETURN(const Run::JoinReply reply, run->Join(spec, rank, session, slices));
  MutexLock lock(mutex_);
  if (made) {
    if (!draining_.ok()) return draining_;
    runs_[spec.name] = run;
  }
  if (!tenant.empty()) tenants_.try_emplace(spec.name, tenant);
  return Joined{run, reply};
}

// Whose it is instead is not the caller's business.
absl::Status RunTable::CheckTenant(const std::string& name, const std::string& tenant) const {
  const auto found = tenants_.find(name);
  if (tenant.empty() || found == tenants_.end() || found->second == tenant) return absl::OkStatus();
  return absl::PermissionDeniedError(
      absl::StrFormat("run \"%s\": belongs to other trainers than those of \"%s\"", name, tenant));
}

absl::StatusOr<std::shared_ptr<Run>> RunTable::Find(const std::string& name,
                                                    const std::string& tenant) const {
  {
    MutexLock lock(mutex_);
    MUOND_RETURN_IF_ERROR(CheckTenant(name, tenant));
  }
  return Find(name);
}

absl::StatusOr<std::shared_ptr<Run>> RunTable::Find(const std::string& name) const {
  MutexLock lock(mutex_);
  const auto found = runs_.find(name);
  if (found != runs_.end()) return found->second;
  return absl::NotFoundError(absl::StrFormat("run \"%s\": there is no such run", name));
}

std::vector<std::shared_ptr<Run>> RunTable::All() const {
  MutexLock lock(mutex_);
  std::vector<std::shared_ptr<Run>> all;
  for (const auto& [name, run] : runs_) all.push_back(run);
  return all;
}

void RunTable::Remove(const std::shared_ptr<Run>& run) {
  {
    MutexLock lock(mutex_);
    const auto found = runs_.find(run->name());
    if (found != runs_.end() && found->second == run) {
      runs_.erase(found);
      tenants_.erase(run->name());
    }
  }
  run->ForgetGeneration();
  run->Stop(absl::AbortedError(absl::StrFormat("run \"%s\": was closed", run->name())));
}

bool RunTable::RefuseNew(bool refuse) {
  MutexLock lock(mutex_);
  return std::exchange(refuse_new_, refuse) != refuse;
}

void RunTable::Drain(const absl::Status& status) {
  std::vector<std::shared_ptr<Run>> all;
  {
    MutexLock lock(mutex_);
    draining_ = status;
    for (const auto& [name, run] : runs_) all.push_back(run);
  }
  for (const auto& run : all) run->Stop(status);
}

}  // namespace muond

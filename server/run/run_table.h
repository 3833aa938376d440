// The runs of this daemon by name. Thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/mutex.h"
#include "server/run/run.h"

namespace muond {

class RunTable {
 public:
  RunTable(const RunContext& context, std::int64_t runs_max)
      : context_(context), runs_max_(runs_max) {}

  // Joins a rank to the run of that name, which is made from the spec when there is none; a run
  // that its first rank could not join is not kept. The first tenant (server/rpc/tenant.h) that
  // joins has it: PERMISSION_DENIED for others from then on. RESOURCE_EXHAUSTED when the daemon has
  // runs_max already, UNAVAILABLE while it drains, else the errors of Run::Create and Run::Join.
  struct Joined {
    std::shared_ptr<Run> run;
    Run::JoinReply reply;
  };
  absl::StatusOr<Joined> Join(const RunSpec& spec, std::int64_t rank, const std::string& session,
                              const RankSlices& slices, const std::string& tenant = "");
  // NOT_FOUND when there is no run of that name.
  absl::StatusOr<std::shared_ptr<Run>> Find(const std::string& name) const;
  // PERMISSION_DENIED when it is another tenant's; without a tenant as above.
  absl::StatusOr<std::shared_ptr<Run>> Find(const std::string& name,
                                            const std::string& tenant) const;
  std::vector<std::shared_ptr<Run>> All() const;
  // Takes the run out of the table and stops it; calls on it that still run get ABORTED.
  void Remove(const std::shared_ptr<Run>& run);
  // No new runs; every run stops with `status`.
  void Drain(const absl::Status& status);
  // Whether runs that are not open yet are refused (UNAVAILABLE); open ones go on.
  // True when that was otherwise before.
  bool RefuseNew(bool refuse);

 private:
  absl::StatusOr<std::shared_ptr<Run>> FindForJoin(const std::string& name) const;
  absl::Status CheckTenant(const std::string& name, const std::string& tenant) const
      MUOND_REQUIRES(mutex_);

  const RunContext context_;
  const std::int64_t runs_max_;
  mutable Mutex mutex_;
  Mutex creation_;  // one Join at a time, without blocking look-ups meanwhile
  std::map<std::string, std::shared_ptr<Run>> runs_ MUOND_GUARDED_BY(mutex_);
  // By run; none: all of its trainers had no tenant.
  std::map<std::string, std::string> tenants_ MUOND_GUARDED_BY(mutex_);
  absl::Status draining_ MUOND_GUARDED_BY(mutex_);
  bool refuse_new_ MUOND_GUARDED_BY(mutex_) = false;
};

}  // namespace muond

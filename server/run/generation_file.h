// The generation that a run has reached on this daemon, on disk: it outlives the daemon, so that
// one that restarts goes back neither to a generation that is over nor behind a promise.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace muond {

struct GenerationRecord {
  std::int64_t generation = 1;
  std::int64_t promised = 0;  // no vote is cast below it
  friend bool operator==(const GenerationRecord&, const GenerationRecord&) = default;
};

// One small file for each run, "<directory>/<run>.generation"; every change is on disk (fsync of
// file and directory) when Store returns, whole or not at all. Thread rule: one caller at a time.
class GenerationFile {
 public:
  // `directory` empty: nothing is kept, Load finds nothing and Store is OK. `run` must be a valid
  // run name.
  GenerationFile(const std::string& directory, const std::string& run);

  // nullopt when there is none. DATA_LOSS naming the file when it is damaged: whoever deletes it
  // must know that no message of the run's former life can arrive any more.
  absl::StatusOr<std::optional<GenerationRecord>> Load() const;
  // UNAVAILABLE naming the file and the cause.
  absl::Status Store(const GenerationRecord& record) const;
  // The run was closed.
  void Remove() const;

 private:
  std::string directory_;
  std::string path_;
};

}  // namespace muond

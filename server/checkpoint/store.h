// The checkpoints of one run in one directory: which there are, how a new one becomes visible at
// once and for good, and how old ones go.
//
//   <root>/<run>/ckpt-<step>/manifest.json, part-*.safetensors     complete, or it does not count
//   <root>/<run>/saving-<step>-<id>/                               being written, or left behind
//   <root>/<run>/deleting-<name>/                                  going
//
// A directory gets its final name, by one rename, when everything in it is on the disk; it loses
// that name, by one rename, before anything in it is removed. One process at a time may save and
// prune a run's checkpoints (daemon 0 of the run); any number may read.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/checkpoint/file_system.h"
#include "server/checkpoint/manifest.h"

namespace muond::checkpoint {

struct Listed {
  std::string name;  // "ckpt-12"
  // OK: complete, as far as manifest, file names and sizes tell. Else why it does not count.
  absl::Status status;
  std::optional<Manifest> manifest;  // when that could be read
};

class Store {
 public:
  // `run` must be a valid name. Touches nothing.
  Store(FileSystem& files, std::string run) : files_(files), run_(std::move(run)) {}

  // All directories that are named like checkpoints: complete ones first, newest first. None where
  // the run has no directory yet.
  absl::StatusOr<std::vector<Listed>> List() const;
  Path PathOf(const std::string& name) const { return {run_, name}; }
  absl::StatusOr<Manifest> ReadManifest(const std::string& name) const;

  // Makes a directory for a new checkpoint (and the run's, durably) and returns its name. `id`:
  // letters and digits that no other save of this run has.
  absl::StatusOr<std::string> Begin(std::int64_t step, const std::string& id);
  // All files are in it and synced: adds the manifest, with the next sequence, and gives it its
  // name, which is returned. Once OK it stays, whatever happens; after an error it may or may not
  // have become visible, but is never visible in part.
  absl::StatusOr<std::string> Publish(const std::string& saving, Manifest manifest);
  // Removes the complete checkpoints but the newest `keep` (at least 1), and what is left behind of
  // saves and removals; `saving`: but this one. The names of the checkpoints removed.
  absl::StatusOr<std::vector<std::string>> Prune(std::int64_t keep, const std::string& saving = "");
  // Removes a save that came to nothing. Errors are left to the next Prune.
  void Abandon(const std::string& saving);

 private:
  absl::Status RemoveTree(const std::string& name);
  absl::Status RemoveLeftovers(const std::string& saving);
  absl::Status CheckFiles(const std::string& name, const Manifest& manifest) const;

  FileSystem& files_;
  const std::string run_;
};

// The step in "ckpt-12" or "ckpt-12.7"; nothing for any other name.
std::optional<std::int64_t> StepOfName(const std::string& name);

}  // namespace muond::checkpoint

// Every file operation that checkpoints do, behind one interface, so that tests can cut the power,
// fill the disk and break the device after any of them.
//
// A path is a list of names below one root directory. Each name must pass ValidateName, so that
// none is "..", absolute or hidden; no name may be a symbolic link: whatever a manifest says,
// nothing outside the root is touched.
//
// Statuses: NOT_FOUND · ALREADY_EXISTS · RESOURCE_EXHAUSTED (no space, quota) · PERMISSION_DENIED
// (rights, read-only) · DATA_LOSS (the device failed) · FAILED_PRECONDITION (a link, not a file, a
// directory that is not empty) · INVALID_ARGUMENT (a name) · INTERNAL (else). Messages name the
// path. Thread rule: any thread; a file by one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace muond::checkpoint {

using Path = std::vector<std::string>;
// "run/ckpt-12/manifest.json".
std::string PathText(const Path& path);
// INVALID_ARGUMENT naming the path unless every name is one.
absl::Status ValidatePath(const Path& path);

class OutputFile {
 public:
  // Closes without syncing.
  virtual ~OutputFile() = default;
  virtual absl::Status Append(const void* data, std::size_t bytes) = 0;
  // What was appended survives a power cut once this returns OK. After an error nothing that was
  // appended may be relied on, not even if a later Sync says OK.
  virtual absl::Status Sync() = 0;
};

class InputFile {
 public:
  virtual ~InputFile() = default;
  virtual std::int64_t size() const = 0;
  // Fills `data` from `offset`. DATA_LOSS when the file ends before.
  virtual absl::Status Read(std::int64_t offset, void* data, std::size_t bytes) = 0;
};

struct DirectoryEntry {
  std::string name;
  bool directory = false;  // else a regular file; whatever is neither is not listed
};

class FileSystem {
 public:
  virtual ~FileSystem() = default;
  virtual absl::Status MakeDirectory(const Path& path) = 0;
  // A new file; ALREADY_EXISTS when the name is taken.
  virtual absl::StatusOr<std::unique_ptr<OutputFile>> Create(const Path& path) = 0;
  virtual absl::StatusOr<std::unique_ptr<InputFile>> Open(const Path& path) = 0;
  // ALREADY_EXISTS when `to` is taken: nothing is ever replaced.
  virtual absl::Status Rename(const Path& from, const Path& to) = 0;
  // The names in the directory are as they are now after a power cut, too.
  virtual absl::Status SyncDirectory(const Path& path) = 0;
  virtual absl::Status RemoveFile(const Path& path) = 0;
  virtual absl::Status RemoveDirectory(const Path& path) = 0;  // must be empty
  // Sorted by name. Names that ValidateName refuses are not ours and are left out.
  virtual absl::StatusOr<std::vector<DirectoryEntry>> List(const Path& path) = 0;
};

// The real one. The root must exist (NOT_FOUND), and may itself be reached through links.
absl::StatusOr<std::unique_ptr<FileSystem>> OpenFileSystem(const std::string& root);

}  // namespace muond::checkpoint

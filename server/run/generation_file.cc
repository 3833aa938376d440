#include "server/run/generation_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>

#include "absl/strings/str_format.h"
#include "proto/crc32c.h"

namespace muond {
namespace {

std::string TextOf(const GenerationRecord& record) {
  std::string text = absl::StrFormat("muond generation file 1\ngeneration %d\npromised %d\n",
                                     record.generation, record.promised);
  return text + absl::StrFormat("crc32c %08x\n", Crc32c(text.data(), text.size()));
}

absl::Status Failed(const std::string& path, const char* action) {
  return absl::UnavailableError(
      absl::StrFormat("generation file \"%s\": %s: %s", path, action, std::strerror(errno)));
}

// Writes `text` to a new file and waits until the disk has it.
absl::Status WriteDurably(const std::string& path, const std::string& text) {
  const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (file < 0) return Failed(path, "create");
  const bool written = write(file, text.data(), text.size()) ==
                       static_cast<ssize_t>(text.size());
  const bool synced = written && fsync(file) == 0;
  absl::Status status = synced ? absl::OkStatus() : Failed(path, written ? "fsync" : "write");
  close(file);
  return status;
}

absl::Status SyncDirectory(const std::string& path) {
  const int directory = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (directory < 0) return Failed(path, "open");
  absl::Status status = fsync(directory) == 0 ? absl::OkStatus() : Failed(path, "fsync");
  close(directory);
  return status;
}

}  // namespace

GenerationFile::GenerationFile(const std::string& directory, const std::string& run)
    : directory_(directory), path_(directory + "/" + run + ".generation") {}

absl::StatusOr<std::optional<GenerationRecord>> GenerationFile::Load() const {
  if (directory_.empty()) return std::optional<GenerationRecord>();
  std::ifstream file(path_);
  if (!file) {
    if (errno == ENOENT) return std::optional<GenerationRecord>();
    return Failed(path_, "open");
  }
  std::ostringstream text;
  text << file.rdbuf();
  GenerationRecord record;
  long long generation = 0, promised = 0;
  const int fields =
      std::sscanf(text.str().c_str(), "muond generation file 1\ngeneration %lld\npromised %lld\n",
                  &generation, &promised);
  record = {generation, promised};
  // What reads back must be the very text that was written.
  if (fields != 2 || TextOf(record) != text.str() || generation < 1 || promised < 0) {
    return absl::DataLossError(absl::StrFormat(
        "generation file \"%s\": is damaged: delete it once no trainer or daemon of the run's "
        "former life is left",
        path_));
  }
  return std::optional<GenerationRecord>(record);
}

absl::Status GenerationFile::Store(const GenerationRecord& record) const {
  if (directory_.empty()) return absl::OkStatus();
  const std::string fresh = path_ + ".new";
  absl::Status written = WriteDurably(fresh, TextOf(record));
  if (!written.ok()) return written;
  if (std::rename(fresh.c_str(), path_.c_str()) != 0) return Failed(path_, "rename");
  return SyncDirectory(directory_);
}

void GenerationFile::Remove() const {
  if (directory_.empty()) return;
  unlink(path_.c_str());
  // A file that comes back after a power failure only raises the next run's generation.
  (void)SyncDirectory(directory_);
}

}  // namespace muond

#include "server/checkpoint/file_system.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "proto/check.h"
#include "proto/values.h"

namespace muond::checkpoint {
namespace {

// Writing back begins before the last byte is there: the fsync has less to wait for.
constexpr std::int64_t kWriteBackBytes = std::int64_t{32} << 20;

class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept { std::swap(fd_, other.fd_); }
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }
  bool ok() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

absl::StatusCode CodeOf(int error) {
  switch (error) {
    case ENOENT: return absl::StatusCode::kNotFound;
    case EEXIST: return absl::StatusCode::kAlreadyExists;
    case ENOSPC:
    case EDQUOT:
    case EFBIG: return absl::StatusCode::kResourceExhausted;
    case EACCES:
    case EPERM:
    case EROFS: return absl::StatusCode::kPermissionDenied;
    case EIO: return absl::StatusCode::kDataLoss;
    case ELOOP:
    case ENOTDIR:
    case EISDIR:
    case ENOTEMPTY: return absl::StatusCode::kFailedPrecondition;
    default: return absl::StatusCode::kInternal;
  }
}

// Of the last system call.
absl::Status Failed(const char* action, const std::string& path) {
  const int error = errno;
  return absl::Status(CodeOf(error), absl::StrFormat("\"%s\": %s: %s%s", path, action,
                                                     std::strerror(error),
                                                     error == ELOOP ? " (a symbolic link)" : ""));
}

class PosixOutput final : public OutputFile {
 public:
  PosixOutput(Descriptor fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}

  absl::Status Append(const void* data, std::size_t bytes) override {
    const char* from = static_cast<const char*>(data);
    while (bytes > 0) {
      const ssize_t wrote = write(fd_.get(), from, bytes);
      if (wrote < 0 && errno == EINTR) continue;
      if (wrote < 0) return Failed("write", path_);
      from += wrote;
      bytes -= wrote;
      written_ += wrote;
    }
    if (written_ - started_ >= kWriteBackBytes) {
      // Only a hint: Sync finds every error.
      (void)sync_file_range(fd_.get(), started_, written_ - started_, SYNC_FILE_RANGE_WRITE);
      started_ = written_;
    }
    return absl::OkStatus();
  }

  absl::Status Sync() override {
    return fsync(fd_.get()) == 0 ? absl::OkStatus() : Failed("fsync", path_);
  }

 private:
  Descriptor fd_;
  std::string path_;
  std::int64_t written_ = 0, started_ = 0;
};

class PosixInput final : public InputFile {
 public:
  PosixInput(Descriptor fd, std::string path, std::int64_t size)
      : fd_(std::move(fd)), path_(std::move(path)), size_(size) {}
  std::int64_t size() const override { return size_; }

  absl::Status Read(std::int64_t offset, void* data, std::size_t bytes) override {
    char* to = static_cast<char*>(data);
    while (bytes > 0) {
      const ssize_t got = pread(fd_.get(), to, bytes, offset);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return Failed("read", path_);
      if (got == 0) {
        return absl::DataLossError(
            absl::StrFormat("\"%s\": read: ends at byte %d", path_, offset));
      }
      to += got;
      offset += got;
      bytes -= got;
    }
    return absl::OkStatus();
  }

 private:
  Descriptor fd_;
  std::string path_;
  std::int64_t size_;
};

class PosixFileSystem final : public FileSystem {
 public:
  explicit PosixFileSystem(Descriptor root) : root_(std::move(root)) {}

  absl::Status MakeDirectory(const Path& path) override {
    MUOND_ASSIGN_OR_RETURN(const Descriptor parent, Parent(path));
    if (mkdirat(parent.get(), path.back().c_str(), 0777) == 0) return absl::OkStatus();
    return Failed("create directory", PathText(path));
  }

  absl::StatusOr<std::unique_ptr<OutputFile>> Create(const Path& path) override {
    MUOND_ASSIGN_OR_RETURN(const Descriptor parent, Parent(path));
    Descriptor fd(openat(parent.get(), path.back().c_str(),
                         O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666));
    if (!fd.ok()) return Failed("create", PathText(path));
    return std::make_unique<PosixOutput>(std::move(fd), PathText(path));
  }

  absl::StatusOr<std::unique_ptr<InputFile>> Open(const Path& path) override {
    MUOND_ASSIGN_OR_RETURN(const Descriptor parent, Parent(path));
    // Nonblocking: opening a pipe that somebody left there must not wait for a writer.
    Descriptor fd(openat(parent.get(), path.back().c_str(),
                         O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
    if (!fd.ok()) return Failed("open", PathText(path));
    struct stat info;
    if (fstat(fd.get(), &info) != 0) return Failed("stat", PathText(path));
    if (!S_ISREG(info.st_mode)) {
      return absl::FailedPreconditionError(
          absl::StrFormat("\"%s\": open: is no regular file", PathText(path)));
    }
    (void)posix_fadvise(fd.get(), 0, 0, POSIX_FADV_SEQUENTIAL);
    return std::make_unique<PosixInput>(std::move(fd), PathText(path), info.st_size);
  }

  absl::Status Rename(const Path& from, const Path& to) override {
    MUOND_ASSIGN_OR_RETURN(const Descriptor parent, Parent(from));
    MUOND_ASSIGN_OR_RETURN(const Descriptor target, Parent(to));
    if (renameat2(parent.get(), from.back().c_str(), target.get(), to.back().c_str(),
                  RENAME_NOREPLACE) == 0) {
      return absl::OkStatus();
    }
    // Not every file system knows the flag. One writer at a time names directories of a run.
    if (errno != EINVAL && errno != ENOSYS) return Failed("rename", PathText(from));
    struct stat info;
    if (fstatat(target.get(), to.back().c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0) {
      errno = EEXIST;
      return Failed("rename", PathText(from));
    }
    if (renameat(parent.get(), from.back().c_str(), target.get(), to.back().c_str()) == 0) {
      return absl::OkStatus();
    }
    return Failed("rename", PathText(from));
  }

  absl::Status SyncDirectory(const Path& path) override {
    MUOND_ASSIGN_OR_RETURN(const Descriptor directory, Directory(path));
    return fsync(directory.get()) == 0 ? absl::OkStatus()
                                       : Failed("fsync of the directory", PathText(path));
  }

  absl::Status RemoveFile(const Path& path) override { return Remove(path, 0); }
  absl::Status RemoveDirectory(const Path& path) override { return Remove(path, AT_REMOVEDIR); }

  absl::StatusOr<std::vector<DirectoryEntry>> List(const Path& path) override {
    MUOND_ASSIGN_OR_RETURN(const Descriptor directory, Directory(path));
    // A descriptor of its own: closedir closes it, and the position is its own.
    const int own = openat(directory.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const std::unique_ptr<DIR, int (*)(DIR*)> stream(own < 0 ? nullptr : fdopendir(own), &closedir);
    if (stream == nullptr) return Failed("list", PathText(path));
    std::vector<DirectoryEntry> entries;
    errno = 0;
    while (const dirent* entry = readdir(stream.get())) {
      struct stat info;
      const std::string name = entry->d_name;
      if (!ValidateName("file", name).ok()) continue;
      if (fstatat(directory.get(), name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0) continue;
      if (S_ISDIR(info.st_mode) || S_ISREG(info.st_mode)) {
        entries.push_back({name, S_ISDIR(info.st_mode)});
      }
      errno = 0;
    }
    if (errno != 0) return Failed("list", PathText(path));
    std::sort(entries.begin(), entries.end(),
              [](const auto& a, const auto& b) { return a.name < b.name; });
    return entries;
  }

 private:
  // The directory itself, step by step from the root: no link is followed on the way.
  absl::StatusOr<Descriptor> Directory(const Path& path) const {
    MUOND_RETURN_IF_ERROR(ValidatePath(path));
    Descriptor at(fcntl(root_.get(), F_DUPFD_CLOEXEC, 0));
    if (!at.ok()) return Failed("open", PathText(path));
    for (const std::string& name : path) {
      at = Descriptor(openat(at.get(), name.c_str(),
                             O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
      if (!at.ok()) return Failed("open directory", PathText(path));
    }
    return at;
  }

  absl::StatusOr<Descriptor> Parent(const Path& path) const {
    MUOND_CHECK(!path.empty(), "the root has no parent");
    MUOND_RETURN_IF_ERROR(ValidatePath(path));
    return Directory(Path(path.begin(), path.end() - 1));
  }

  absl::Status Remove(const Path& path, int flags) {
    MUOND_ASSIGN_OR_RETURN(const Descriptor parent, Parent(path));
    if (unlinkat(parent.get(), path.back().c_str(), flags) == 0) return absl::OkStatus();
    return Failed("remove", PathText(path));
  }

  const Descriptor root_;
};

}  // namespace

std::string PathText(const Path& path) { return absl::StrJoin(path, "/"); }

absl::Status ValidatePath(const Path& path) {
  for (const std::string& name : path) {
    if (absl::Status valid = ValidateName("file", name); !valid.ok()) {
      return absl::InvalidArgumentError(
          absl::StrFormat("checkpoint path: %s", valid.message()));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<FileSystem>> OpenFileSystem(const std::string& root) {
  Descriptor fd(open(root.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd.ok()) return Failed("open the checkpoint directory", root);
  return std::make_unique<PosixFileSystem>(std::move(fd));
}

}  // namespace muond::checkpoint

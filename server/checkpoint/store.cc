#include "server/checkpoint/store.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "proto/check.h"
#include "proto/values.h"

namespace muond::checkpoint {
namespace {

constexpr char kPrefix[] = "ckpt-";
constexpr char kSaving[] = "saving-";
constexpr char kDeleting[] = "deleting-";

std::optional<std::int64_t> Digits(const std::string& text) {
  std::int64_t value = 0;
  if (text.empty() || text.find_first_not_of("0123456789") != std::string::npos) return {};
  if (!absl::SimpleAtoi(text, &value)) return {};
  return value;
}

// OK also when it is there already.
absl::Status Ensure(FileSystem& files, const Path& path) {
  const absl::Status made = files.MakeDirectory(path);
  return absl::IsAlreadyExists(made) ? absl::OkStatus() : made;
}

}  // namespace

std::optional<std::int64_t> StepOfName(const std::string& name) {
  if (!absl::StartsWith(name, kPrefix)) return {};
  const std::string rest = name.substr(sizeof(kPrefix) - 1);
  const std::size_t dot = rest.find('.');
  if (dot != std::string::npos && !Digits(rest.substr(dot + 1))) return {};
  return Digits(rest.substr(0, dot));
}

absl::StatusOr<Manifest> Store::ReadManifest(const std::string& name) const {
  MUOND_ASSIGN_OR_RETURN(const auto file, files_.Open({run_, name, kManifestName}));
  if (file->size() > kManifestBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrFormat("manifest: has %d bytes, at most %d are read", file->size(),
                        kManifestBytesMax));
  }
  std::string text(static_cast<std::size_t>(file->size()), '\0');
  MUOND_RETURN_IF_ERROR(file->Read(0, text.data(), text.size()));
  MUOND_ASSIGN_OR_RETURN(Manifest manifest, ParseManifest(text));
  if (manifest.run != run_) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "manifest: belongs to run \"%s\", not to \"%s\"", manifest.run, run_));
  }
  if (StepOfName(name) != manifest.control.step) {
    return absl::FailedPreconditionError(
        absl::StrFormat("manifest: is of step %d, not of \"%s\"", manifest.control.step, name));
  }
  return manifest;
}

absl::Status Store::CheckFiles(const std::string& name, const Manifest& manifest) const {
  for (const FileRecord& record : manifest.files) {
    const auto file = files_.Open({run_, name, record.name});
    if (!file.ok()) return file.status();
    if ((*file)->size() != record.bytes) {
      return absl::DataLossError(absl::StrFormat("\"%s\": has %d bytes, expected %d", record.name,
                                                 (*file)->size(), record.bytes));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Listed>> Store::List() const {
  const auto entries = files_.List({run_});
  if (absl::IsNotFound(entries.status())) return std::vector<Listed>{};
  if (!entries.ok()) return entries.status();
  std::vector<Listed> listed;
  for (const DirectoryEntry& entry : *entries) {
    if (!entry.directory || !StepOfName(entry.name)) continue;
    Listed one{.name = entry.name};
    auto manifest = ReadManifest(entry.name);
    one.status = manifest.ok() ? CheckFiles(entry.name, *manifest) : manifest.status();
    if (manifest.ok()) one.manifest = *std::move(manifest);
    listed.push_back(std::move(one));
  }
  const auto rank = [](const Listed& one) {
    return std::tuple(one.status.ok(), one.manifest ? one.manifest->sequence : 0,
                      *StepOfName(one.name), one.name);
  };
  std::sort(listed.begin(), listed.end(),
            [&](const Listed& a, const Listed& b) { return rank(a) > rank(b); });
  return listed;
}

absl::StatusOr<std::string> Store::Begin(std::int64_t step, const std::string& id) {
  MUOND_RETURN_IF_ERROR(Ensure(files_, {run_}));
  MUOND_RETURN_IF_ERROR(files_.SyncDirectory({}));
  std::string name = absl::StrFormat("%s%d-%s", kSaving, step, id);
  MUOND_RETURN_IF_ERROR(files_.MakeDirectory({run_, name}));
  return name;
}

absl::StatusOr<std::string> Store::Publish(const std::string& saving, Manifest manifest) {
  MUOND_ASSIGN_OR_RETURN(const std::vector<Listed> others, List());
  manifest.sequence = 1;
  for (const Listed& other : others) {
    if (!other.manifest) continue;
    manifest.sequence = std::max(manifest.sequence, other.manifest->sequence + 1);
  }
  const std::string text = ManifestText(manifest);
  // What could not be read again must not become the newest.
  if (const auto parsed = ParseManifest(text); !parsed.ok()) {
    return absl::InternalError(absl::StrFormat("save: %s", parsed.status().message()));
  }
  {
    MUOND_ASSIGN_OR_RETURN(const auto file, files_.Create({run_, saving, kManifestName}));
    MUOND_RETURN_IF_ERROR(file->Append(text.data(), text.size()));
    MUOND_RETURN_IF_ERROR(file->Sync());
  }
  MUOND_RETURN_IF_ERROR(files_.SyncDirectory({run_, saving}));
  std::string name = absl::StrFormat("%s%d", kPrefix, manifest.control.step);
  absl::Status renamed = files_.Rename({run_, saving}, {run_, name});
  if (absl::IsAlreadyExists(renamed)) {
    // Of an earlier life of the run, or damaged: it stays, this one is newer.
    name = absl::StrFormat("%s.%d", name, manifest.sequence);
    renamed = files_.Rename({run_, saving}, {run_, name});
  }
  MUOND_RETURN_IF_ERROR(renamed);
  MUOND_RETURN_IF_ERROR(files_.SyncDirectory({run_}));
  return name;
}

absl::Status Store::RemoveTree(const std::string& name) {
  MUOND_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries, files_.List({run_, name}));
  for (const DirectoryEntry& entry : entries) {
    MUOND_RETURN_IF_ERROR(files_.RemoveFile({run_, name, entry.name}));
  }
  return files_.RemoveDirectory({run_, name});
}

absl::Status Store::RemoveLeftovers(const std::string& saving) {
  const auto entries = files_.List({run_});
  if (absl::IsNotFound(entries.status())) return absl::OkStatus();
  if (!entries.ok()) return entries.status();
  for (const DirectoryEntry& entry : *entries) {
    const bool left = absl::StartsWith(entry.name, kSaving) && entry.name != saving;
    if (!entry.directory || !(left || absl::StartsWith(entry.name, kDeleting))) continue;
    MUOND_RETURN_IF_ERROR(RemoveTree(entry.name));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> Store::Prune(std::int64_t keep,
                                                      const std::string& saving) {
  MUOND_RETURN_IF_ERROR(RemoveLeftovers(saving));
  MUOND_ASSIGN_OR_RETURN(const std::vector<Listed> listed, List());
  std::vector<std::string> removed;
  std::int64_t complete = 0;
  for (const Listed& one : listed) {
    if (!one.status.ok() || ++complete <= std::max<std::int64_t>(keep, 1)) continue;
    MUOND_RETURN_IF_ERROR(files_.Rename({run_, one.name}, {run_, kDeleting + one.name}));
    removed.push_back(one.name);
  }
  if (removed.empty()) return removed;
  MUOND_RETURN_IF_ERROR(files_.SyncDirectory({run_}));
  MUOND_RETURN_IF_ERROR(RemoveLeftovers(saving));
  return removed;
}

void Store::Abandon(const std::string& saving) { (void)RemoveTree(saving); }

}  // namespace muond::checkpoint

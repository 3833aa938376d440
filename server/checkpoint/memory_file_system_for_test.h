// A file system in memory that knows what is on the disk and what is only about to be: the power
// can be cut after any operation, and any operation can fail.
//
// What was not synced survives a cut or does not, each write and each change of a directory by
// itself, in any order; a write may survive in part. A sync that fails loses what it was to sync,
// for good, as on Linux.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "server/checkpoint/file_system.h"

namespace muond::checkpoint {

class MemoryFileSystem final : public FileSystem {
 public:
  // Called before each operation that changes something, with its number since the last Count(0)
  // and its name ("create", "write", "fsync", "mkdir", "rename", "syncdir", "remove"). What is not
  // OK becomes the operation's answer, and nothing is done.
  using Fault = std::function<absl::Status(int number, const std::string& operation)>;
  void SetFault(Fault fault) {
    fault_ = std::move(fault);
    operations_ = 0;
  }
  int operations() const { return operations_; }

  // What the disk holds after the power was cut now; the file system goes on from there.
  void CutPower(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    Settle(*root_, random);
  }
  // Flips one bit of what is there.
  void Damage(const Path& path, std::size_t byte) {
    Node& file = *Find(path);
    file.data[byte % file.data.size()] ^= 4;
    file.durable = file.data;
  }

  absl::Status MakeDirectory(const Path& path) override {
    if (absl::Status status = Ask("mkdir"); !status.ok()) return status;
    return Add(path, std::make_shared<Node>(Node{.directory = true}));
  }
  absl::StatusOr<std::unique_ptr<OutputFile>> Create(const Path& path) override {
    if (absl::Status status = Ask("create"); !status.ok()) return status;
    auto node = std::make_shared<Node>();
    if (absl::Status status = Add(path, node); !status.ok()) return status;
    return std::make_unique<Output>(this, node);
  }
  absl::StatusOr<std::unique_ptr<InputFile>> Open(const Path& path) override {
    if (absl::Status valid = ValidatePath(path); !valid.ok()) return valid;
    const std::shared_ptr<Node> node = Find(path);
    if (node == nullptr || node->directory) return absl::NotFoundError(PathText(path));
    return std::make_unique<Input>(node);
  }
  absl::Status Rename(const Path& from, const Path& to) override {
    if (absl::Status status = Ask("rename"); !status.ok()) return status;
    const std::shared_ptr<Node> parent = Find({from.begin(), from.end() - 1});
    const std::shared_ptr<Node> node = Find(from);
    if (node == nullptr) return absl::NotFoundError(PathText(from));
    if (Find(to) != nullptr) return absl::AlreadyExistsError(PathText(to));
    parent->entries.erase(from.back());
    parent->entries[to.back()] = node;
    parent->changes.push_back({from.back(), to.back(), node});
    return absl::OkStatus();
  }
  absl::Status SyncDirectory(const Path& path) override {
    const std::shared_ptr<Node> node = Find(path);
    if (node == nullptr) return absl::NotFoundError(PathText(path));
    if (absl::Status status = Ask("syncdir"); !status.ok()) {
      node->changes.clear();
      return status;
    }
    node->durable_entries = node->entries;
    node->changes.clear();
    return absl::OkStatus();
  }
  absl::Status RemoveFile(const Path& path) override { return Remove(path); }
  absl::Status RemoveDirectory(const Path& path) override {
    const std::shared_ptr<Node> node = Find(path);
    if (node != nullptr && !node->entries.empty()) {
      return absl::FailedPreconditionError(PathText(path));
    }
    return Remove(path);
  }
  absl::StatusOr<std::vector<DirectoryEntry>> List(const Path& path) override {
    const std::shared_ptr<Node> node = Find(path);
    if (node == nullptr) return absl::NotFoundError(PathText(path));
    std::vector<DirectoryEntry> entries;
    for (const auto& [name, entry] : node->entries) entries.push_back({name, entry->directory});
    return entries;
  }

 private:
  struct Node;
  // "" to "b": added; "a" to "": removed; "a" to "b": renamed.
  struct Change {
    std::string from, to;
    std::shared_ptr<Node> node;
  };
  struct Node {
    bool directory = false;
    std::map<std::string, std::shared_ptr<Node>> entries, durable_entries;
    std::vector<Change> changes;  // not synced
    std::string data, durable;
    std::vector<std::pair<std::size_t, std::string>> writes;  // not synced: place and bytes
  };

  class Output final : public OutputFile {
   public:
    Output(MemoryFileSystem* files, std::shared_ptr<Node> node)
        : files_(files), node_(std::move(node)) {}
    absl::Status Append(const void* data, std::size_t bytes) override {
      if (absl::Status status = files_->Ask("write"); !status.ok()) return status;
      const std::string text(static_cast<const char*>(data), bytes);
      node_->writes.push_back({node_->data.size(), text});
      node_->data += text;
      return absl::OkStatus();
    }
    absl::Status Sync() override {
      absl::Status status = files_->Ask("fsync");
      if (status.ok()) node_->durable = node_->data;
      node_->writes.clear();
      return status;
    }

   private:
    MemoryFileSystem* files_;
    std::shared_ptr<Node> node_;
  };

  class Input final : public InputFile {
   public:
    explicit Input(std::shared_ptr<Node> node) : node_(std::move(node)) {}
    std::int64_t size() const override { return static_cast<std::int64_t>(node_->data.size()); }
    absl::Status Read(std::int64_t offset, void* data, std::size_t bytes) override {
      if (offset + static_cast<std::int64_t>(bytes) > size()) return absl::DataLossError("ends");
      std::copy_n(node_->data.begin() + offset, bytes, static_cast<char*>(data));
      return absl::OkStatus();
    }

   private:
    std::shared_ptr<Node> node_;
  };

  absl::Status Ask(const std::string& operation) {
    return fault_ == nullptr ? absl::OkStatus() : fault_(operations_++, operation);
  }

  std::shared_ptr<Node> Find(const Path& path) const {
    std::shared_ptr<Node> node = root_;
    for (const std::string& name : path) {
      const auto found = node->entries.find(name);
      if (found == node->entries.end()) return nullptr;
      node = found->second;
    }
    return node;
  }

  absl::Status Add(const Path& path, std::shared_ptr<Node> node) {
    if (absl::Status valid = ValidatePath(path); !valid.ok()) return valid;
    const std::shared_ptr<Node> parent = Find({path.begin(), path.end() - 1});
    if (parent == nullptr) return absl::NotFoundError(PathText(path));
    if (!parent->entries.emplace(path.back(), node).second) {
      return absl::AlreadyExistsError(PathText(path));
    }
    parent->changes.push_back({"", path.back(), std::move(node)});
    return absl::OkStatus();
  }

  absl::Status Remove(const Path& path) {
    if (absl::Status status = Ask("remove"); !status.ok()) return status;
    const std::shared_ptr<Node> parent = Find({path.begin(), path.end() - 1});
    if (parent == nullptr || parent->entries.erase(path.back()) == 0) {
      return absl::NotFoundError(PathText(path));
    }
    parent->changes.push_back({path.back(), "", nullptr});
    return absl::OkStatus();
  }

  static void Settle(Node& node, std::mt19937_64& random) {
    std::string bytes = node.durable;
    for (const auto& [place, text] : node.writes) {
      const std::size_t kept = random() % 3 == 0   ? 0
                               : random() % 2 == 0 ? text.size()
                                                   : random() % (text.size() + 1);
      if (kept == 0) continue;
      bytes.resize(std::max(bytes.size(), place + (random() % 2 ? kept : text.size())));
      std::copy_n(text.begin(), kept, bytes.begin() + place);
    }
    node.data = node.durable = bytes;
    node.writes.clear();
    for (const Change& change : node.changes) {
      if (random() % 2 == 0) continue;
      node.durable_entries.erase(change.from);
      if (!change.to.empty()) node.durable_entries[change.to] = change.node;
    }
    node.changes.clear();
    node.entries = node.durable_entries;
    for (const auto& [name, entry] : node.entries) Settle(*entry, random);
  }

  std::shared_ptr<Node> root_ = std::make_shared<Node>(Node{.directory = true});
  Fault fault_;
  int operations_ = 0;
};

}  // namespace muond::checkpoint

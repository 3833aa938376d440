// Shards are read: from pieces that were cut otherwise, with every byte checked on the way.
#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_format.h"
#include "proto/check.h"
#include "proto/crc32c.h"
#include "server/checkpoint/part.h"
#include "server/checkpoint/safetensors.h"

namespace muond::checkpoint {
namespace {

constexpr std::int64_t kBlockBytes = std::int64_t{4} << 20;

// What the manifest says of one piece in a file.
struct ExpectedPiece {
  const Parameter* parameter = nullptr;
  const StateTensor* tensor = nullptr;
  const Piece* piece = nullptr;
};
using PiecesByKey = std::map<std::string, ExpectedPiece>;

// Bytes [begin, end) of the file go to `data`.
struct Copy {
  std::int64_t begin = 0, end = 0;
  char* data = nullptr;
};

std::map<std::string, PiecesByKey> PiecesByFile(const Manifest& manifest) {
  std::map<std::string, PiecesByKey> files;
  for (const FileRecord& file : manifest.files) files[file.name];
  for (const Parameter& parameter : manifest.parameters) {
    for (const StateTensor& tensor : parameter.tensors) {
      for (const Piece& piece : tensor.pieces) {
        files[piece.file][piece.key] = {&parameter, &tensor, &piece};
      }
    }
  }
  return files;
}

absl::Status Named(const std::string& file, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrFormat("\"%s\": %s", file, status.message()));
}

class CheckedFile {
 public:
  CheckedFile(FileSystem& files, Path path, const FileRecord& record, const PiecesByKey& expected)
      : files_(files), path_(std::move(path)), record_(record), expected_(expected) {}

  // The header, checked against the manifest.
  absl::Status Open() {
    MUOND_ASSIGN_OR_RETURN(file_, files_.Open(path_));
    if (file_->size() != record_.bytes) {
      return absl::DataLossError(
          absl::StrFormat("has %d bytes, expected %d", file_->size(), record_.bytes));
    }
    if (record_.bytes < kHeaderLengthBytes) return absl::DataLossError("is too short");
    unsigned char first[kHeaderLengthBytes];
    MUOND_RETURN_IF_ERROR(file_->Read(0, first, sizeof(first)));
    MUOND_ASSIGN_OR_RETURN(const std::int64_t length,
                           SafetensorsHeaderLength(first, record_.bytes));
    std::string text(length, '\0');
    MUOND_RETURN_IF_ERROR(file_->Read(kHeaderLengthBytes, text.data(), text.size()));
    crc_ = Crc32c(text.data(), text.size(), Crc32c(first, sizeof(first)));
    MUOND_ASSIGN_OR_RETURN(header_, ParseSafetensorsHeader(text, record_.bytes));
    return CheckKeys();
  }

  // Where the elements of a piece begin in the file.
  std::int64_t Begin(const std::string& key) const { return begin_.at(key); }

  // Reads all data; `copies` ascend and don't overlap.
  absl::Status ReadAll(std::vector<Copy> copies) {
    std::sort(copies.begin(), copies.end(),
              [](const Copy& a, const Copy& b) { return a.begin < b.begin; });
    std::vector<char> block(static_cast<std::size_t>(std::min(kBlockBytes, record_.bytes)));
    std::size_t next = 0;
    for (std::int64_t at = header_.data_begin; at < record_.bytes;) {
      const std::int64_t count =
          std::min(static_cast<std::int64_t>(block.size()), record_.bytes - at);
      MUOND_RETURN_IF_ERROR(file_->Read(at, block.data(), count));
      crc_ = Crc32c(block.data(), count, crc_);
      while (next < copies.size() && copies[next].end <= at) ++next;
      for (std::size_t i = next; i < copies.size() && copies[i].begin < at + count; ++i) {
        const std::int64_t begin = std::max(at, copies[i].begin);
        const std::int64_t end = std::min(at + count, copies[i].end);
        std::memcpy(copies[i].data + (begin - copies[i].begin), block.data() + (begin - at),
                    end - begin);
      }
      at += count;
    }
    if (crc_ == record_.crc32c) return absl::OkStatus();
    return absl::DataLossError(
        absl::StrFormat("crc32c %08x, expected %08x", crc_, record_.crc32c));
  }

 private:
  absl::Status CheckKeys() {
    for (const SafetensorsTensor& tensor : header_.tensors) {
      const auto found = expected_.find(tensor.name);
      if (found == expected_.end()) {
        return absl::InvalidArgumentError(
            absl::StrFormat("tensor \"%s\" is in no manifest: a key too many", tensor.name));
      }
      const ExpectedPiece& piece = found->second;
      const auto bytes = piece.piece->elements *
                         static_cast<std::int64_t>(DtypeBytes(piece.tensor->dtype));
      if (tensor.dtype != piece.tensor->dtype || tensor.end - tensor.begin != bytes) {
        return absl::InvalidArgumentError(absl::StrFormat(
            "tensor \"%s\": %d bytes of %s, the manifest has %d of %s", tensor.name,
            tensor.end - tensor.begin, SafetensorsDtype(tensor.dtype), bytes,
            SafetensorsDtype(piece.tensor->dtype)));
      }
      begin_[tensor.name] = header_.data_begin + tensor.begin;
    }
    for (const auto& [key, piece] : expected_) {
      if (begin_.count(key) > 0) continue;
      return absl::InvalidArgumentError(
          absl::StrFormat("tensor \"%s\" is missing", key));
    }
    return absl::OkStatus();
  }

  FileSystem& files_;
  const Path path_;
  const FileRecord& record_;
  const PiecesByKey& expected_;
  std::unique_ptr<InputFile> file_;
  SafetensorsHeader header_;
  std::map<std::string, std::int64_t> begin_;
  std::uint32_t crc_ = 0;
};

// Sinks of each (parameter, tensor).
using SinksByTensor =
    std::map<std::pair<std::string, std::string>,
             std::vector<std::pair<const ShardSink*, const TensorSink*>>>;

// What of the piece goes where; offsets count from the piece's first byte.
std::vector<Copy> CopiesOf(const ExpectedPiece& expected, const SinksByTensor& sinks) {
  std::vector<Copy> copies;
  const auto found = sinks.find({expected.parameter->name, expected.tensor->name});
  if (found == sinks.end()) return copies;
  const auto width = static_cast<std::int64_t>(DtypeBytes(expected.tensor->dtype));
  const Piece& piece = *expected.piece;
  for (const auto& [shard, tensor] : found->second) {
    const std::int64_t begin = std::max(piece.first, shard->first);
    const std::int64_t end =
        std::min(piece.first + piece.elements, shard->first + shard->elements);
    if (begin >= end) continue;
    copies.push_back({(begin - piece.first) * width, (end - piece.first) * width,
                      static_cast<char*>(tensor->data) + (begin - shard->first) * width});
  }
  return copies;
}

absl::Status CheckSinks(const Manifest& manifest, const SinksByTensor& sinks) {
  std::map<std::pair<std::string, std::string>, Dtype> there;
  for (const Parameter& parameter : manifest.parameters) {
    for (const StateTensor& tensor : parameter.tensors) {
      there[{parameter.name, tensor.name}] = tensor.dtype;
    }
  }
  for (const auto& [key, list] : sinks) {
    const auto found = there.find(key);
    const Dtype kept = list[0].second->dtype;
    if (found == there.end()) {
      return absl::FailedPreconditionError(absl::StrFormat(
          "parameter \"%s\": restore: the checkpoint has no \"%s\"", key.first, key.second));
    }
    if (found->second == kept) continue;
    return absl::FailedPreconditionError(absl::StrFormat(
        "parameter \"%s\": restore: \"%s\" is %s in the checkpoint, this run keeps it in %s: state "
        "is neither widened nor narrowed on its way in",
        key.first, key.second, SafetensorsDtype(found->second), SafetensorsDtype(kept)));
  }
  return absl::OkStatus();
}

absl::Status ReadFiles(FileSystem& files, const Path& directory, const Manifest& manifest,
                       const SinksByTensor& sinks, bool all) {
  const auto pieces = PiecesByFile(manifest);
  for (const FileRecord& record : manifest.files) {
    const PiecesByKey& expected = pieces.at(record.name);
    bool wanted = all;
    for (const auto& [key, piece] : expected) wanted = wanted || !CopiesOf(piece, sinks).empty();
    if (!wanted) continue;
    Path path = directory;
    path.push_back(record.name);
    CheckedFile file(files, path, record, expected);
    if (absl::Status opened = file.Open(); !opened.ok()) return Named(record.name, opened);
    std::vector<Copy> copies;
    for (const auto& [key, piece] : expected) {
      for (Copy copy : CopiesOf(piece, sinks)) {
        copy.begin += file.Begin(key);
        copy.end += file.Begin(key);
        copies.push_back(copy);
      }
    }
    if (absl::Status read = file.ReadAll(std::move(copies)); !read.ok()) {
      return Named(record.name, read);
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ReadShards(FileSystem& files, const Path& directory, const Manifest& manifest,
                        std::span<const ShardSink> sinks) {
  SinksByTensor by_tensor;
  for (const ShardSink& shard : sinks) {
    for (const TensorSink& tensor : shard.tensors) {
      by_tensor[{shard.parameter, tensor.name}].push_back({&shard, &tensor});
    }
  }
  MUOND_RETURN_IF_ERROR(CheckSinks(manifest, by_tensor));
  return ReadFiles(files, directory, manifest, by_tensor, false);
}

absl::Status Verify(FileSystem& files, const Path& directory, const Manifest& manifest) {
  return ReadFiles(files, directory, manifest, {}, true);
}

}  // namespace muond::checkpoint

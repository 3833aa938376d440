// A part is written: which pieces go into which file, and the bytes.
#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "proto/check.h"
#include "proto/crc32c.h"
#include "server/checkpoint/part.h"
#include "server/checkpoint/safetensors.h"

namespace muond::checkpoint {
namespace {

// Small enough to be in the cache still when it is written, after its checksum was taken.
constexpr std::size_t kBlockBytes = std::size_t{2} << 20;
// Keeps headers far below their limit.
constexpr std::size_t kTensorsPerFileMax = 50'000;

struct PlannedPiece {
  const ShardView* shard = nullptr;
  const TensorView* tensor = nullptr;
  std::int64_t first = 0, elements = 0;  // in the parameter

  std::int64_t bytes() const {
    return elements * static_cast<std::int64_t>(DtypeBytes(tensor->dtype));
  }
  const char* data() const {
    return static_cast<const char*>(tensor->data) +
           (first - shard->first) * static_cast<std::int64_t>(DtypeBytes(tensor->dtype));
  }
};

std::int64_t CountOf(const Dims& shape) {
  std::int64_t elements = 1;
  for (const std::int64_t side : shape) elements *= side;
  return elements;
}

// Elements of one row along dim 0; 0 where there are no rows.
std::int64_t RowElements(const Dims& shape) {
  return shape.empty() || shape[0] == 0 ? 0 : CountOf(shape) / shape[0];
}

// The elements of a row, where the range is one of whole rows; else 0.
std::int64_t WholeRow(const Dims& shape, std::int64_t first, std::int64_t elements) {
  const std::int64_t row = RowElements(shape);
  return row > 0 && first % row == 0 && elements % row == 0 ? row : 0;
}

std::string KeyOf(const PlannedPiece& piece) {
  std::string name = piece.shard->parameter + "." + piece.tensor->name;
  if (piece.elements == CountOf(piece.shard->shape)) return name;
  return absl::StrFormat("%s[%d:%d]", name, piece.first, piece.first + piece.elements);
}

Dims ShapeOf(const PlannedPiece& piece) {
  const Dims& shape = piece.shard->shape;
  if (piece.elements == CountOf(shape)) return shape;
  const std::int64_t row = WholeRow(shape, piece.first, piece.elements);
  if (row == 0) return {piece.elements};
  Dims rows = shape;
  rows[0] = piece.elements / row;
  return rows;
}

std::vector<PlannedPiece> PlanPieces(std::span<const ShardView> shards, const PartLimits& limits) {
  std::vector<PlannedPiece> pieces;
  for (const ShardView& shard : shards) {
    for (const TensorView& tensor : shard.tensors) {
      const auto most = std::max<std::int64_t>(
          limits.piece_bytes / static_cast<std::int64_t>(DtypeBytes(tensor.dtype)), 1);
      std::int64_t step = most;
      const std::int64_t row = WholeRow(shard.shape, shard.first, shard.elements);
      if (row > 0) step = std::max<std::int64_t>(most / row, 1) * row;
      std::int64_t at = 0;
      do {
        const std::int64_t count = std::min(step, shard.elements - at);
        pieces.push_back({&shard, &tensor, shard.first + at, count});
        at += count;
      } while (at < shard.elements);
    }
  }
  return pieces;
}

// A file that is being written, with its checksum.
class SummedFile {
 public:
  SummedFile(std::unique_ptr<OutputFile> file, std::string name) : file_(std::move(file)) {
    record_.name = std::move(name);
  }

  absl::Status Append(const char* data, std::int64_t bytes) {
    for (std::int64_t at = 0; at < bytes; at += kBlockBytes) {
      const auto count = static_cast<std::size_t>(std::min<std::int64_t>(kBlockBytes, bytes - at));
      record_.crc32c = Crc32c(data + at, count, record_.crc32c);
      MUOND_RETURN_IF_ERROR(file_->Append(data + at, count));
    }
    record_.bytes += bytes;
    return absl::OkStatus();
  }
  absl::Status Sync() { return file_->Sync(); }
  const FileRecord& record() const { return record_; }

 private:
  std::unique_ptr<OutputFile> file_;
  FileRecord record_;
};

absl::Status WriteFile(FileSystem& files, const Path& directory, const std::string& name,
                       std::span<const PlannedPiece> pieces, Part& part) {
  std::vector<SafetensorsTensor> tensors;
  for (const PlannedPiece& piece : pieces) {
    tensors.push_back({KeyOf(piece), piece.tensor->dtype, ShapeOf(piece)});
    part.pieces.push_back({piece.shard->parameter, piece.tensor->name, piece.tensor->dtype,
                           {name, KeyOf(piece), piece.first, piece.elements}});
  }
  MUOND_ASSIGN_OR_RETURN(const std::string header,
                         BuildSafetensorsHeader(tensors, {{"format", "muond-checkpoint"}}));
  Path path = directory;
  path.push_back(name);
  MUOND_ASSIGN_OR_RETURN(auto created, files.Create(path));
  SummedFile file(std::move(created), name);
  MUOND_RETURN_IF_ERROR(file.Append(header.data(), static_cast<std::int64_t>(header.size())));
  for (const PlannedPiece& piece : pieces) {
    MUOND_RETURN_IF_ERROR(file.Append(piece.data(), piece.bytes()));
  }
  MUOND_RETURN_IF_ERROR(file.Sync());
  part.files.push_back(file.record());
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Part> WritePart(FileSystem& files, const Path& directory, int daemon,
                               std::span<const ShardView> shards, const PartLimits& limits) {
  Part part;
  for (const ShardView& shard : shards) part.t[shard.parameter] = shard.t;
  const std::vector<PlannedPiece> pieces = PlanPieces(shards, limits);
  for (std::size_t begin = 0; begin < pieces.size();) {
    std::size_t end = begin;
    std::int64_t bytes = 0;
    while (end < pieces.size() && end - begin < kTensorsPerFileMax &&
           (end == begin || bytes + pieces[end].bytes() <= limits.file_bytes)) {
      bytes += pieces[end++].bytes();
    }
    const std::string name =
        absl::StrFormat("part-%d-%d.safetensors", daemon, part.files.size());
    MUOND_RETURN_IF_ERROR(WriteFile(files, directory, name,
                                    std::span(pieces).subspan(begin, end - begin), part));
    begin = end;
  }
  MUOND_RETURN_IF_ERROR(files.SyncDirectory(directory));
  return part;
}

absl::StatusOr<Manifest> Assemble(std::vector<Parameter> layout, const std::vector<Part>& parts) {
  Manifest manifest{.parameters = std::move(layout)};
  std::map<std::string, Parameter*> by_name;
  for (Parameter& parameter : manifest.parameters) {
    parameter.t = -1;
    by_name[parameter.name] = &parameter;
  }
  for (const Part& part : parts) {
    manifest.files.insert(manifest.files.end(), part.files.begin(), part.files.end());
    for (const auto& [name, t] : part.t) {
      const auto found = by_name.find(name);
      if (found == by_name.end() || (found->second->t >= 0 && found->second->t != t)) {
        return absl::InternalError(absl::StrFormat(
            "parameter \"%s\": save: daemons disagree about it or its t %d", name, t));
      }
      found->second->t = t;
    }
    for (const StoredPiece& stored : part.pieces) {
      Parameter& parameter = *by_name.at(stored.parameter);
      const auto tensor = std::find_if(
          parameter.tensors.begin(), parameter.tensors.end(),
          [&](const StateTensor& each) { return each.name == stored.tensor; });
      if (tensor == parameter.tensors.end()) {
        return absl::InternalError(absl::StrFormat("parameter \"%s\": save: no tensor \"%s\"",
                                                   stored.parameter, stored.tensor));
      }
      tensor->dtype = stored.dtype;
      tensor->pieces.push_back(stored.piece);
    }
  }
  std::sort(manifest.files.begin(), manifest.files.end(),
            [](const auto& a, const auto& b) { return a.name < b.name; });
  for (Parameter& parameter : manifest.parameters) {
    for (StateTensor& tensor : parameter.tensors) {
      std::sort(tensor.pieces.begin(), tensor.pieces.end(),
                [](const Piece& a, const Piece& b) { return a.first < b.first; });
    }
  }
  return manifest;
}

}  // namespace muond::checkpoint

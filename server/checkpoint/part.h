// One daemon's part of a checkpoint: its shards into safetensors files, and shards out of the files
// of whatever daemons wrote them.
//
// Thread rule: any thread; the tensors are the caller's and must not change meanwhile.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/values.h"
#include "server/checkpoint/file_system.h"
#include "server/checkpoint/manifest.h"

namespace muond::checkpoint {

// Where cuts are made, in bytes. A piece above the first is cut, along dim 0 where the shard is
// made of whole rows; a file above the second is ended.
struct PartLimits {
  std::int64_t piece_bytes = std::int64_t{1} << 30;
  std::int64_t file_bytes = std::int64_t{4} << 30;
};

// One tensor of a shard: `elements` values of `dtype`, packed.
struct TensorView {
  std::string name;  // "master", ...
  Dtype dtype = Dtype::kF32;
  const void* data = nullptr;
};

// Elements [first, first + elements) of a parameter that this daemon owns.
struct ShardView {
  std::string parameter;
  Dims shape;  // of the whole parameter
  std::int64_t first = 0, elements = 0;
  std::int64_t t = 0;
  std::vector<TensorView> tensors;
};

struct StoredPiece {
  std::string parameter, tensor;
  Dtype dtype = Dtype::kF32;
  Piece piece;
  friend bool operator==(const StoredPiece&, const StoredPiece&) = default;
};

// What a daemon has written, and reports.
struct Part {
  std::vector<FileRecord> files;
  std::vector<StoredPiece> pieces;
  std::map<std::string, std::int64_t> t;  // by parameter
};

// Writes the shards into files "part-<daemon>-<n>.safetensors" of the directory, each synced, then
// syncs the directory: what the part names survives a power cut. Errors are the file system's; the
// directory is then good for nothing.
absl::StatusOr<Part> WritePart(FileSystem& files, const Path& directory, int daemon,
                               std::span<const ShardView> shards, const PartLimits& limits = {});

// Puts the parts of all daemons together: `layout` (layout.h) gets its pieces and t. INTERNAL when
// they don't make up every tensor exactly once or disagree about a t.
absl::StatusOr<Manifest> Assemble(std::vector<Parameter> layout, const std::vector<Part>& parts);

// Memory for one tensor of a shard, to be filled.
struct TensorSink {
  std::string name;
  Dtype dtype = Dtype::kF32;
  void* data = nullptr;
};
struct ShardSink {
  std::string parameter;
  std::int64_t first = 0, elements = 0;
  std::vector<TensorSink> tensors;
};

// Fills all sinks, whatever the cuts were when the checkpoint was written. Every file that is read
// is read whole and its checksum compared, its header against the manifest: DATA_LOSS or
// INVALID_ARGUMENT naming the file, NOT_FOUND when it is not there; the sinks' contents are then
// undefined.
absl::Status ReadShards(FileSystem& files, const Path& directory, const Manifest& manifest,
                        std::span<const ShardSink> sinks);

// Reads and judges every file.
absl::Status Verify(FileSystem& files, const Path& directory, const Manifest& manifest);

}  // namespace muond::checkpoint

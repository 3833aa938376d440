// What one checkpoint is: the contents of manifest.json, and its text. Pure.
// docs/checkpoint_format.md describes every field for other readers.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/values.h"

namespace muond::checkpoint {

inline constexpr char kManifestName[] = "manifest.json";
inline constexpr std::int64_t kSchema = 1;
// No manifest of ours is larger; one that is, is refused before it is read.
inline constexpr std::int64_t kManifestBytesMax = std::int64_t{1} << 30;

// Elements [first, first + elements) of a flattened tensor, stored under `key` in `file`.
struct Piece {
  std::string file, key;
  std::int64_t first = 0, elements = 0;
  friend bool operator==(const Piece&, const Piece&) = default;
};

// One state tensor of a parameter: "master", "momentum", "exp_avg" or "exp_avg_sq".
struct StateTensor {
  std::string name;
  Dtype dtype = Dtype::kF32;
  std::vector<Piece> pieces;  // ascending; they cover the tensor exactly
  friend bool operator==(const StateTensor&, const StateTensor&) = default;
};

// A parameter that holds state, and what must be alike where it is restored.
struct Parameter {
  std::string name;
  Dims shape;
  std::string algorithm;      // "muon" or "adamw"
  std::string momentum_form;  // "ema" or "sum"; AdamW's is ""
  std::string matrices;       // what Newton-Schulz sees (MatricesText); AdamW's is ""
  std::vector<std::string> tied;  // other names of the same tensor, sorted
  std::int64_t t = 0;             // applied steps
  std::vector<StateTensor> tensors;
  friend bool operator==(const Parameter&, const Parameter&) = default;
};

struct FileRecord {
  std::string name;
  std::int64_t bytes = 0;
  std::uint32_t crc32c = 0;  // of the whole file
  friend bool operator==(const FileRecord&, const FileRecord&) = default;
};

struct Scaler {
  double scale = 1;
  std::int64_t good_steps = 0, hysteresis_left = 1, overflows_at_minimum = 0;
  friend bool operator==(const Scaler&, const Scaler&) = default;
};

struct Counters {
  std::int64_t applied_steps = 0, skipped_steps = 0, consecutive_skips = 0;
  friend bool operator==(const Counters&, const Counters&) = default;
};

// What belongs to the run as a whole, alike on all of its daemons.
struct Control {
  std::int64_t generation = 1;
  std::int64_t step = 0;  // consumed steps: the next one has this number
  Scaler scaler;
  Counters counters;
  std::optional<StepOutcome> last_outcome;
  std::map<std::string, Hyperparameters> muon, adamw;  // in force, by group
  friend bool operator==(const Control&, const Control&) = default;
};

struct Manifest {
  std::string run;
  std::int64_t sequence = 1;  // of the run's checkpoints in this directory: newer ones have more
  Control control;
  std::string fingerprint;  // of the layout (layout.h)
  std::string saved_at;     // RFC 3339, UTC
  std::string writer;       // "muond 0.1.0"
  std::int64_t daemons = 1;  // that wrote it
  std::vector<Parameter> parameters;  // by name
  std::vector<FileRecord> files;      // by name
  friend bool operator==(const Manifest&, const Manifest&) = default;

  std::int64_t Bytes() const;  // of all files
};

// The text begins with a line that holds the crc32c of all that follows.
std::string ManifestText(const Manifest& manifest);

// DATA_LOSS when the checksum is wrong; UNIMPLEMENTED for a newer schema; INVALID_ARGUMENT naming
// what is wrong for all else: a missing field, a name that is none, a piece in a file that is not
// listed, pieces that don't cover their tensor.
absl::StatusOr<Manifest> ParseManifest(const std::string& text);

}  // namespace muond::checkpoint

// The header of a safetensors file, written and read. Pure.
//
// The format (github.com/huggingface/safetensors): 8 bytes N, little endian; N bytes of JSON, an
// object from tensor name to {"dtype", "shape", "data_offsets": [begin, end]} and "__metadata__",
// an object of strings; then the data that the offsets count in, covered exactly, without overlap.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/values.h"

namespace muond::checkpoint {

inline constexpr std::int64_t kHeaderLengthBytes = 8;
// The format's own limit on N.
inline constexpr std::int64_t kHeaderBytesMax = 100'000'000;

struct SafetensorsTensor {
  std::string name;
  Dtype dtype = Dtype::kF32;
  Dims shape;
  std::int64_t begin = 0, end = 0;  // bytes, counted from the end of the header
  friend bool operator==(const SafetensorsTensor&, const SafetensorsTensor&) = default;
};

struct SafetensorsHeader {
  std::vector<SafetensorsTensor> tensors;  // in the order of their data
  std::map<std::string, std::string> metadata;
  std::int64_t data_begin = 0;  // in the file
};

// "F32", "BF16", "F16", and back.
std::string SafetensorsDtype(Dtype dtype);
absl::StatusOr<Dtype> ParseSafetensorsDtype(const std::string& name);

// Everything before the data, length included, padded with spaces so that data begins at a multiple
// of 8. begin and end are filled in: the data follow each other in the order of `tensors`.
// INVALID_ARGUMENT when the header would exceed its limit.
absl::StatusOr<std::string> BuildSafetensorsHeader(
    std::vector<SafetensorsTensor>& tensors, const std::map<std::string, std::string>& metadata);

// N, from a file's first 8 bytes. INVALID_ARGUMENT when it exceeds the limit or the file.
absl::StatusOr<std::int64_t> SafetensorsHeaderLength(const unsigned char* first,
                                                     std::int64_t file_bytes);

// `json`: the N bytes that follow. INVALID_ARGUMENT saying what is wrong: no JSON, a name twice, an
// unknown dtype, offsets that are no range, don't fit the shape, overlap, leave a hole or a tail.
absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(const std::string& json,
                                                         std::int64_t file_bytes);

}  // namespace muond::checkpoint

// The header of a safetensors file: length, JSON, offsets that must cover the data exactly.
#include <string>
#include <utility>

#include "proto/check.h"
#include "server/checkpoint/safetensors.h"
#include "tests/fuzz/input.h"

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace muond::checkpoint;  // NOLINT
  muond::fuzz::Input input(data, size);
  const std::int64_t data_bytes = input.Int64() & ((std::int64_t{1} << 40) - 1);
  std::string json(input.Rest());
  const std::int64_t header = static_cast<std::int64_t>(json.size());
  const std::int64_t file_bytes = kHeaderLengthBytes + header + data_bytes;
  if (size >= 8) SafetensorsHeaderLength(data, file_bytes).IgnoreError();
  const auto parsed = ParseSafetensorsHeader(json, file_bytes);
  if (!parsed.ok()) return 0;
  std::int64_t at = 0;
  for (const SafetensorsTensor& tensor : parsed->tensors) {
    MUOND_CHECK(tensor.begin == at && tensor.end >= at, "no hole, no overlap");
    at = tensor.end;
  }
  MUOND_CHECK(parsed->data_begin + at == file_bytes, "no tail");
  auto tensors = parsed->tensors;
  const auto built = BuildSafetensorsHeader(tensors, parsed->metadata);
  MUOND_CHECK(built.ok(), "what was read can be written");
  MUOND_CHECK(tensors == parsed->tensors, "and has its data where they were");
  return 0;
}

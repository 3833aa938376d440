#include "server/checkpoint/safetensors.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "proto/check.h"
#include "server/checkpoint/strict_json.h"

namespace muond::checkpoint {
namespace {

constexpr char kMetadata[] = "__metadata__";

template <typename... Args>
absl::Status Bad(const absl::FormatSpec<Args...>& format, const Args&... args) {
  return absl::InvalidArgumentError("safetensors header: " + absl::StrFormat(format, args...));
}

bool IsCount(const Json& value) {
  return value.is_number_unsigned() &&
         value.get<std::uint64_t>() <= std::uint64_t{1} << 62;
}

absl::StatusOr<SafetensorsTensor> ParseTensor(const std::string& name, const Json& entry) {
  JsonReader reader(entry, absl::StrFormat("safetensors header: tensor \"%s\"", name));
  SafetensorsTensor tensor{.name = name};
  const std::string dtype = reader.Text("dtype");
  const Json& shape = reader.Array("shape");
  const Json& offsets = reader.Array("data_offsets");
  MUOND_RETURN_IF_ERROR(reader.status());
  MUOND_ASSIGN_OR_RETURN(tensor.dtype, ParseSafetensorsDtype(dtype));
  if (shape.size() > kMaxRank) return Bad("tensor \"%s\": %d dimensions", name, shape.size());
  for (const Json& side : shape) {
    if (!IsCount(side)) return Bad("tensor \"%s\": a side that is no count", name);
    tensor.shape.push_back(side.get<std::int64_t>());
  }
  MUOND_ASSIGN_OR_RETURN(const std::int64_t elements, ElementCount(tensor.shape));
  if (offsets.size() != 2 || !IsCount(offsets[0]) || !IsCount(offsets[1])) {
    return Bad("tensor \"%s\": data_offsets are not two counts", name);
  }
  tensor.begin = offsets[0].get<std::int64_t>();
  tensor.end = offsets[1].get<std::int64_t>();
  const std::int64_t bytes = elements * static_cast<std::int64_t>(DtypeBytes(tensor.dtype));
  if (tensor.end - tensor.begin != bytes) {
    return Bad("tensor \"%s\": data_offsets [%d, %d] hold %d bytes, shape %s of %s has %d", name,
               tensor.begin, tensor.end, tensor.end - tensor.begin, DimsToString(tensor.shape),
               dtype, bytes);
  }
  return tensor;
}

}  // namespace

std::string SafetensorsDtype(Dtype dtype) {
  switch (dtype) {
    case Dtype::kF32: return "F32";
    case Dtype::kBF16: return "BF16";
    case Dtype::kF16: return "F16";
  }
  return "";
}

absl::StatusOr<Dtype> ParseSafetensorsDtype(const std::string& name) {
  for (const Dtype dtype : {Dtype::kF32, Dtype::kBF16, Dtype::kF16}) {
    if (SafetensorsDtype(dtype) == name) return dtype;
  }
  return Bad("dtype \"%s\": expected F32, BF16 or F16", name);
}

absl::StatusOr<std::string> BuildSafetensorsHeader(
    std::vector<SafetensorsTensor>& tensors, const std::map<std::string, std::string>& metadata) {
  Json json = Json::object();
  json[kMetadata] = metadata;
  std::int64_t at = 0;
  for (SafetensorsTensor& tensor : tensors) {
    MUOND_ASSIGN_OR_RETURN(const std::int64_t elements, ElementCount(tensor.shape));
    tensor.begin = at;
    at += elements * static_cast<std::int64_t>(DtypeBytes(tensor.dtype));
    tensor.end = at;
    json[tensor.name] = {{"dtype", SafetensorsDtype(tensor.dtype)},
                         {"shape", tensor.shape},
                         {"data_offsets", {tensor.begin, tensor.end}}};
  }
  std::string text = json.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  if (static_cast<std::int64_t>(text.size()) > kHeaderBytesMax) {
    return Bad("%d tensors need %d bytes, the format allows %d", tensors.size(), text.size(),
               kHeaderBytesMax);
  }
  std::string header(kHeaderLengthBytes, '\0');
  for (int i = 0; i < kHeaderLengthBytes; ++i) {
    header[i] = static_cast<char>(text.size() >> (8 * i) & 0xff);
  }
  return header + text;
}

absl::StatusOr<std::int64_t> SafetensorsHeaderLength(const unsigned char* first,
                                                     std::int64_t file_bytes) {
  std::uint64_t length = 0;
  for (int i = 0; i < kHeaderLengthBytes; ++i) length |= std::uint64_t{first[i]} << (8 * i);
  if (length > std::uint64_t{kHeaderBytesMax}) {
    return Bad("declares %d bytes, the format allows %d", length, kHeaderBytesMax);
  }
  if (static_cast<std::int64_t>(length) > file_bytes - kHeaderLengthBytes) {
    return Bad("declares %d bytes, the file has %d", length, file_bytes);
  }
  return static_cast<std::int64_t>(length);
}

absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(const std::string& text,
                                                         std::int64_t file_bytes) {
  if (text.empty() || text.front() != '{') return Bad("does not begin with \"{\"");
  MUOND_ASSIGN_OR_RETURN(const Json json, ParseStrictJson(text));
  SafetensorsHeader header;
  header.data_begin = kHeaderLengthBytes + static_cast<std::int64_t>(text.size());
  for (const auto& [name, entry] : json.items()) {
    if (name != kMetadata) {
      MUOND_ASSIGN_OR_RETURN(SafetensorsTensor tensor, ParseTensor(name, entry));
      header.tensors.push_back(std::move(tensor));
      continue;
    }
    JsonReader reader(entry, "safetensors header: __metadata__");
    for (const auto& [key, value] : entry.items()) {
      header.metadata[key] = reader.Text(key.c_str());
    }
    MUOND_RETURN_IF_ERROR(reader.status());
  }
  std::stable_sort(header.tensors.begin(), header.tensors.end(), [](const auto& a, const auto& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  std::int64_t at = 0;
  for (const SafetensorsTensor& tensor : header.tensors) {
    if (tensor.begin != at) {
      return Bad("tensor \"%s\" begins at byte %d, expected %d: %s", tensor.name, tensor.begin, at,
                 tensor.begin > at ? "a hole" : "it overlaps another");
    }
    at = tensor.end;
  }
  if (header.data_begin + at != file_bytes) {
    return Bad("tensors end at byte %d, the file has %d", header.data_begin + at, file_bytes);
  }
  return header;
}

}  // namespace muond::checkpoint

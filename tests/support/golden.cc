// A safetensors reader for tests: eight bytes of header length, a JSON header, raw tensors.
#include "tests/support/golden.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>

namespace muond::testing {
namespace {

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("golden file \"" + path + "\": cannot be opened");
  std::ostringstream contents;
  contents << file.rdbuf();
  return contents.str();
}

template <typename Element>
std::vector<double> Widen(const std::string& bytes, std::size_t begin, std::size_t end) {
  std::vector<double> values((end - begin) / sizeof(Element));
  for (std::size_t i = 0; i < values.size(); ++i) {
    Element element;
    std::memcpy(&element, bytes.data() + begin + i * sizeof(element), sizeof(element));
    values[i] = element;
  }
  return values;
}

GoldenTensor ReadTensor(const std::string& data, const nlohmann::json& entry) {
  GoldenTensor tensor;
  tensor.shape = entry.at("shape").get<std::vector<std::int64_t>>();
  const auto offsets = entry.at("data_offsets").get<std::vector<std::size_t>>();
  if (offsets.size() != 2 || offsets[0] > offsets[1] || offsets[1] > data.size()) {
    throw std::runtime_error("data_offsets outside the file");
  }
  const auto dtype = entry.at("dtype").get<std::string>();
  if (dtype == "F32") {
    tensor.values = Widen<float>(data, offsets[0], offsets[1]);
  } else if (dtype == "F64") {
    tensor.values = Widen<double>(data, offsets[0], offsets[1]);
  } else {
    throw std::runtime_error("dtype " + dtype + " is not read here");
  }
  std::int64_t elements = 1;
  for (const std::int64_t side : tensor.shape) elements *= side;
  if (tensor.values.size() != static_cast<std::size_t>(elements)) {
    throw std::runtime_error("shape and byte count disagree");
  }
  return tensor;
}

}  // namespace

const GoldenTensor& GoldenCase::at(const std::string& key) const {
  const auto found = tensors.find(key);
  if (found == tensors.end()) {
    throw std::runtime_error("golden case \"" + name + "\": no tensor \"" + key + "\"");
  }
  return found->second;
}

std::string GoldenDirectory() {
  const char* directory = std::getenv("MUOND_GOLDEN_DIR");
  return directory != nullptr ? directory : MUOND_GOLDEN_DEFAULT_DIR;
}

std::vector<std::string> GoldenCaseNames() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(GoldenDirectory())) {
    if (entry.path().extension() == ".safetensors") names.push_back(entry.path().stem().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

GoldenCase ReadGoldenCase(const std::string& name) {
  const std::string path = GoldenDirectory() + "/" + name + ".safetensors";
  const std::string bytes = ReadFile(path);
  try {
    std::uint64_t header_bytes = 0;
    if (bytes.size() < sizeof(header_bytes)) throw std::runtime_error("shorter than its header");
    std::memcpy(&header_bytes, bytes.data(), sizeof(header_bytes));
    if (header_bytes > bytes.size() - sizeof(header_bytes)) {
      throw std::runtime_error("header runs past the end");
    }
    const auto header = nlohmann::json::parse(bytes.substr(sizeof(header_bytes), header_bytes));
    const std::string data = bytes.substr(sizeof(header_bytes) + header_bytes);
    GoldenCase result;
    result.name = name;
    result.settings =
        nlohmann::json::parse(header.at("__metadata__").at("case").get<std::string>());
    for (const auto& [key, entry] : header.items()) {
      if (key != "__metadata__") result.tensors[key] = ReadTensor(data, entry);
    }
    return result;
  } catch (const std::exception& error) {
    throw std::runtime_error("golden file \"" + path + "\": " + error.what());
  }
}

}  // namespace muond::testing

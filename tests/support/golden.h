// Reads the golden trajectories of tests/golden: safetensors files written by PyTorch itself.
//
// Files are read at run time from $MUOND_GOLDEN_DIR, or else from the source tree, so that a
// changed file changes the test. Errors throw std::runtime_error with the file's name: a test that
// cannot read its truth must fail. Format: https://github.com/huggingface/safetensors
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace muond::testing {

// One tensor, widened to fp64 (exact for F32 and F64, the only types that the files hold).
struct GoldenTensor {
  std::vector<std::int64_t> shape;
  std::vector<double> values;
};

struct GoldenCase {
  std::string name;         // "muon_default"
  nlohmann::json settings;  // __metadata__["case"]: optimizer, shapes, lr per step, ...
  std::map<std::string, GoldenTensor> tensors;

  // The tensor `key`, "grad.2.0" for parameter 0 in step 2; throws where there is none.
  const GoldenTensor& at(const std::string& key) const;
};

// The folder that the files are read from.
std::string GoldenDirectory();

// Names, without ".safetensors", of all cases in the folder, sorted.
std::vector<std::string> GoldenCaseNames();

GoldenCase ReadGoldenCase(const std::string& name);

}  // namespace muond::testing

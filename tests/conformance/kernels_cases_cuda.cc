// The backend that needs a device. Results of Newton-Schulz are held to what 16-bit products can
// give (docs/semantics.md); all else is held to what the host's backends are.
#include <cstdlib>
#include <string_view>

#include "kernels/cuda/cuda_backend.h"
#include "tests/conformance/kernels_driver.h"

namespace muond::kernels::testing {
namespace {

std::unique_ptr<Backend> MakeCuda(const BackendOptions& options) {
  Error error;
  return MakeCudaBackend(0, options, error);
}

}  // namespace

std::vector<BackendCase> BackendCases() { return {{"cuda", MakeCuda, 1e-3, 2e-2}}; }

std::unique_ptr<Backend> MakeOrSkip(const BackendCase& backend, const BackendOptions& options) {
  std::unique_ptr<Backend> made = backend.make(options);
  if (made != nullptr) return made;
  Error error;
  MakeCudaBackend(0, {}, error);
  const char* required = std::getenv("MUOND_REQUIRE_GPU");
  const bool must = required != nullptr && std::string_view(required) == "1";
  [&] {
    if (must) FAIL() << "MUOND_REQUIRE_GPU=1, but there is no backend: " << error.message();
    GTEST_SKIP() << "NOT RUN, it needs a GPU: " << error.message();
  }();
  return nullptr;
}

}  // namespace muond::kernels::testing

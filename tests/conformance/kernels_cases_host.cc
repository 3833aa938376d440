// The backends that need no device.
#include "tests/conformance/kernels_driver.h"

namespace muond::kernels::testing {
namespace {

std::unique_ptr<Backend> MakeReference(const BackendOptions&) { return MakeReferenceBackend(); }

template <Products kProducts>
std::unique_ptr<Backend> MakeCpu(const BackendOptions& options) {
  BackendOptions with = options;
  with.products = kProducts;
  return MakeCpuBackend(with);
}

}  // namespace

std::vector<BackendCase> BackendCases() {
  return {{"reference", MakeReference, 2e-7, 0, false},
          {"cpu", MakeCpu<Products::kF32>, 3e-6},
          {"cpu_openblas", MakeCpu<Products::kOpenBlas>, 3e-6},
          {"cpu_bf16", MakeCpu<Products::kBF16>, 3e-6, 2e-2}};
}

std::unique_ptr<Backend> MakeOrSkip(const BackendCase& backend, const BackendOptions& options) {
  std::unique_ptr<Backend> made = backend.make(options);
  if (made == nullptr) {
    [&] { GTEST_SKIP() << backend.name << ": this processor has no bf16 products"; }();
  }
  return made;
}

}  // namespace muond::kernels::testing

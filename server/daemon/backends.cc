#include "server/daemon/backends.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/device_memory.h"
#include "proto/check.h"

namespace muond {
namespace {

using kernels::CudaDevice;
using kernels::CudaDevices;

bool WantsAll(const std::vector<std::string>& devices) {
  return devices.size() == 1 && devices[0] == "all";
}

std::string Describe(const CudaDevice& device) {
  return absl::StrFormat("device %d (%s, %s)", device.ordinal, device.name, device.uuid);
}

std::string TooOld(const CudaDevice& device) {
  return absl::StrFormat("%s has compute capability %d.%d, this build needs 8.0 or more",
                         Describe(device), device.capability_major, device.capability_minor);
}

bool Named(const CudaDevice& device, const std::string& word) {
  int ordinal = 0;
  if (absl::SimpleAtoi(word, &ordinal)) return device.ordinal == ordinal;
  return absl::StartsWith(word, "GPU-") && absl::StartsWith(device.uuid, word);
}

absl::StatusOr<CudaDevice> FindDevice(const CudaDevices& found, const std::string& word) {
  std::vector<CudaDevice> named;
  std::vector<std::string> known;
  for (const CudaDevice& device : found.devices) {
    known.push_back(Describe(device));
    if (Named(device, word)) named.push_back(device);
  }
  if (named.empty()) {
    return absl::NotFoundError(
        absl::StrFormat("devices: there is no device \"%s\": %s", word,
                        known.empty() ? found.why_none : "there is " + absl::StrJoin(known, ", ")));
  }
  if (named.size() > 1) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "devices: \"%s\" names %d devices: give more of the UUID", word, named.size()));
  }
  if (!named[0].usable) {
    return absl::FailedPreconditionError("devices: " + TooOld(named[0]));
  }
  return named[0];
}

absl::StatusOr<Backends> MakeCuda(const BackendChoice& choice,
                                  const std::vector<CudaDevice>& devices) {
  Backends backends;
  std::vector<std::string> names;
  for (const CudaDevice& device : devices) {
    kernels::Error error;
    backends.list.push_back(kernels::MakeCudaBackend(device.ordinal, choice.options, error));
    if (backends.list.back() == nullptr) {
      return absl::FailedPreconditionError(absl::StrFormat("backend cuda: %s", error.message()));
    }
    backends.memories.push_back(kernels::MakeCudaDeviceMemory(device.ordinal, error));
    if (backends.memories.back() == nullptr) {
      return absl::FailedPreconditionError(absl::StrFormat("backend cuda: %s", error.message()));
    }
    backends.models.push_back(device.name);
    names.push_back(Describe(device));
  }
  backends.why = absl::StrJoin(names, ", ");
  return backends;
}

absl::StatusOr<Backends> MakeHost(const BackendChoice& choice, std::string why) {
  Backends backends{.list = {}, .models = {""}, .why = std::move(why)};
  if (choice.backend == "reference") {
    backends.list.push_back(kernels::MakeReferenceBackend());
    return backends;
  }
  kernels::BackendOptions options = choice.options;
  options.products = choice.cpu_products == "f32"    ? kernels::Products::kF32
                     : choice.cpu_products == "bf16" ? kernels::Products::kBF16
                                                     : kernels::Products::kAuto;
  backends.list.push_back(kernels::MakeCpuBackend(options));
  if (backends.list[0] == nullptr) {
    return absl::FailedPreconditionError(
        "cpu-products bf16: this processor has no bf16 products: choose auto or f32");
  }
  return backends;
}

// Where nothing was asked for by name: the first reason why CUDA is not to be had, empty if it is.
std::string WhyNoCuda(const CudaDevices& found) {
  if (found.devices.empty()) return found.why_none;
  for (const CudaDevice& device : found.devices) {
    if (device.usable) return "";
  }
  return TooOld(found.devices[0]);
}

}  // namespace

absl::StatusOr<std::vector<CudaDevice>> SelectDevices(const CudaDevices& found,
                                                      const std::vector<std::string>& wanted) {
  std::vector<CudaDevice> selected;
  if (WantsAll(wanted)) {
    std::copy_if(found.devices.begin(), found.devices.end(), std::back_inserter(selected),
                 [](const CudaDevice& device) { return device.usable; });
    return selected;
  }
  for (const std::string& word : wanted) {
    MUOND_ASSIGN_OR_RETURN(const CudaDevice device, FindDevice(found, word));
    for (const CudaDevice& other : selected) {
      if (other.ordinal != device.ordinal) continue;
      return absl::InvalidArgumentError(
          absl::StrFormat("devices: %s is named twice", Describe(device)));
    }
    selected.push_back(device);
  }
  std::sort(selected.begin(), selected.end(),
            [](const CudaDevice& a, const CudaDevice& b) { return a.ordinal < b.ordinal; });
  return selected;
}

absl::StatusOr<Backends> MakeBackends(const BackendChoice& choice) {
  const bool automatic = choice.backend == "auto";
  if (!automatic && choice.backend != "cuda" && choice.backend != "cpu" &&
      choice.backend != "reference") {
    return absl::InvalidArgumentError(absl::StrFormat(
        "backend: expected auto, cuda, cpu or reference, got \"%s\"", choice.backend));
  }
  if (choice.cpu_products != "auto" && choice.cpu_products != "f32" &&
      choice.cpu_products != "bf16") {
    return absl::InvalidArgumentError(absl::StrFormat(
        "cpu-products: expected auto, f32 or bf16, got \"%s\"", choice.cpu_products));
  }
  if (choice.backend == "cpu" || choice.backend == "reference") {
    if (!WantsAll(choice.devices)) {
      return absl::InvalidArgumentError(
          absl::StrFormat("devices: backend %s has none to choose from", choice.backend));
    }
    return MakeHost(choice, "as asked for");
  }
  const CudaDevices found = kernels::ListCudaDevices();
  // Devices that are asked for by name are wanted in any case.
  if (WantsAll(choice.devices)) {
    const std::string why_not = WhyNoCuda(found);
    if (!why_not.empty() && automatic) return MakeHost(choice, "no CUDA here: " + why_not);
    if (!why_not.empty()) return absl::FailedPreconditionError("backend cuda: " + why_not);
  }
  MUOND_ASSIGN_OR_RETURN(const std::vector<CudaDevice> devices,
                         SelectDevices(found, choice.devices));
  return MakeCuda(choice, devices);
}

}  // namespace muond

// Who hears that a device can't be used by this process any more.
#pragma once

#include <functional>
#include <string>
#include <utility>

#include "kernels/tensor.h"

namespace muond::kernels {

// What a device can be that its process may lose: a kernel that faults, or memory that goes bad,
// ends CUDA's context there, and every later call fails with the same words. Only a new process has
// the device again.
class Losable {
 public:
  // `hears` gets the message of the error that showed it, on the thread of the call that met it,
  // perhaps more than once. Set before the object is used.
  void OnLost(std::function<void(const std::string&)> hears) { hears_ = std::move(hears); }

 protected:
  Losable() = default;
  ~Losable() = default;
  // The error, once `hears` has been told of it.
  Error Lost(Error error) const {
    if (hears_ != nullptr) hears_(error.message());
    return error;
  }

 private:
  std::function<void(const std::string&)> hears_;
};

}  // namespace muond::kernels

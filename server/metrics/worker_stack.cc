#include "server/metrics/worker_stack.h"

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <cstddef>

// The sanitizers have this function to themselves, and their builds have no CUDA.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

// Stands before the C library's for every shared library of the process.
extern "C" int pthread_attr_setstacksize(pthread_attr_t* attributes, std::size_t bytes) noexcept {
  constexpr std::size_t kLeast = std::size_t{1} << 20;
  using Function = int (*)(pthread_attr_t*, std::size_t);
  static const Function next =
      reinterpret_cast<Function>(dlsym(RTLD_NEXT, "pthread_attr_setstacksize"));
  return next(attributes, std::max(bytes, kLeast));
}

#endif

namespace muond {

void GiveThreadsRoom() {}

}  // namespace muond

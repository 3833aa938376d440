#include "server/daemon/build_info.h"

namespace muond {

BuildInfo ThisBuild() {
  return {.version = MUOND_VERSION,
          .revision = MUOND_REVISION,
          .cuda = MUOND_CUDA_VERSION,
#ifdef __clang__
          .compiler = "clang " __clang_version__};
#else
          .compiler = "g++ " __VERSION__};
#endif
}

}  // namespace muond

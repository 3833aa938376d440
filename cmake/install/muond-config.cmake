# find_package(muond) gives muond::client, the C++ client, with all that it needs.
include(CMakeFindDependencyMacro)
find_dependency(Threads)
find_dependency(absl CONFIG)
find_dependency(Protobuf)
find_dependency(gRPC CONFIG)
find_dependency(OpenSSL)
find_dependency(PkgConfig)
# Of a build with CUDA alone: its runtime, linked statically.
find_package(CUDAToolkit QUIET)
if(NOT TARGET PkgConfig::ISAL)
  pkg_check_modules(ISAL REQUIRED QUIET IMPORTED_TARGET GLOBAL libisal)
endif()
include("${CMAKE_CURRENT_LIST_DIR}/muond-targets.cmake")

# Third-party libraries, all from Debian 12. Found once here, used by target name elsewhere.
find_package(Threads REQUIRED)
find_package(absl CONFIG REQUIRED)
find_package(Protobuf REQUIRED)
find_package(gRPC CONFIG REQUIRED)
find_package(OpenSSL REQUIRED)
find_package(prometheus-cpp CONFIG REQUIRED)
find_package(GTest REQUIRED)
find_package(benchmark CONFIG REQUIRED)
find_package(nlohmann_json CONFIG REQUIRED)
find_package(spdlog CONFIG REQUIRED)
find_package(CLI11 CONFIG REQUIRED)
find_package(TBB CONFIG REQUIRED)
find_package(OpenBLAS CONFIG REQUIRED)
# Debian's own Python, whatever stands first on PATH: it is the one that sees Debian's packages.
if(NOT DEFINED Python3_EXECUTABLE AND EXISTS /usr/bin/python3)
  set(Python3_EXECUTABLE /usr/bin/python3)
endif()
find_package(Python3 REQUIRED COMPONENTS Interpreter)
find_package(PkgConfig REQUIRED)
pkg_check_modules(SYSTEMD REQUIRED IMPORTED_TARGET libsystemd)
pkg_check_modules(XXHASH REQUIRED IMPORTED_TARGET libxxhash)
# Whether the library chooses the processor's widest instructions itself (x86, DISPATCH=1).
include(CheckCXXSourceCompiles)
set(CMAKE_REQUIRED_LIBRARIES PkgConfig::XXHASH)
check_cxx_source_compiles("#include <xxh_x86dispatch.h>
int main() { return static_cast<int>(XXH3_64bits_dispatch(\"\", 0)); }" MUOND_XXHASH_DISPATCH)
unset(CMAKE_REQUIRED_LIBRARIES)
pkg_check_modules(ISAL REQUIRED IMPORTED_TARGET libisal)
pkg_check_modules(RE2 REQUIRED IMPORTED_TARGET re2)

# Debian's OpenBLAS package config names files, not a target.
add_library(muond_openblas INTERFACE)
target_include_directories(muond_openblas SYSTEM INTERFACE ${OpenBLAS_INCLUDE_DIRS})
target_link_libraries(muond_openblas INTERFACE ${OpenBLAS_LIBRARIES})

# oneDNN by its files: the package's own config asks for OpenCL, which the CPU part does not need.
# libdnnl runs on GNU OpenMP, whose thread count the cpu backend sets around its calls.
find_path(MUOND_ONEDNN_INCLUDE oneapi/dnnl/dnnl.hpp REQUIRED)
find_library(MUOND_ONEDNN_LIBRARY dnnl REQUIRED)
find_library(MUOND_GOMP_LIBRARY NAMES libgomp.so.1 REQUIRED)
add_library(muond_onednn INTERFACE)
target_include_directories(muond_onednn SYSTEM INTERFACE "${MUOND_ONEDNN_INCLUDE}")
target_link_libraries(muond_onednn INTERFACE "${MUOND_ONEDNN_LIBRARY}" "${MUOND_GOMP_LIBRARY}")

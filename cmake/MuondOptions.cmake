# Build options and the compiler flags that every target shares.
option(MUOND_WERROR "Treat warnings as errors" ON)
set(MUOND_SANITIZE "" CACHE STRING
  "Sanitizers for every target: empty, address (with undefined) or thread")
set(MUOND_TSAN_LIBRARIES "${CMAKE_SOURCE_DIR}/build/tsan-libraries/lib" CACHE PATH
  "Where tests/tsan/build-libraries put the instrumented libraries (MUOND_SANITIZE=thread)")
option(MUOND_FUZZ "Instrument everything for libFuzzer and make its programs (clang)" OFF)
set(MUOND_CUDA "AUTO" CACHE STRING "Build the CUDA code: ON, OFF, or AUTO (on where nvcc is found)")

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/bin")

# Paths below the source folder are hashed relative to it: every build folder and every clone of the
# same sources shares one cache.
find_program(MUOND_CCACHE ccache)
if(MUOND_CCACHE)
  set(MUOND_LAUNCHER env "CCACHE_BASEDIR=${CMAKE_SOURCE_DIR}" CCACHE_NOHASHDIR=1 "${MUOND_CCACHE}")
  set(CMAKE_CXX_COMPILER_LAUNCHER ${MUOND_LAUNCHER})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${MUOND_LAUNCHER})
endif()

add_library(muond_flags INTERFACE)
target_include_directories(muond_flags INTERFACE
  "$<BUILD_INTERFACE:${CMAKE_SOURCE_DIR}>" "$<INSTALL_INTERFACE:include/muond>")
# No contraction: whether a*b+c is fused must not depend on the compiler's mood, or two builds of
# the same source would train to different bits. Kernels that want an FMA say so.
target_compile_features(muond_flags INTERFACE cxx_std_20)
target_compile_options(muond_flags INTERFACE
  $<BUILD_INTERFACE:$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wno-unused-parameter>>
  $<BUILD_INTERFACE:$<$<COMPILE_LANGUAGE:CXX>:-Wno-missing-field-initializers>>
  $<BUILD_INTERFACE:$<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>>)
# Who holds which lock, as proto/mutex.h has it told: clang alone reads that.
target_compile_options(muond_flags INTERFACE
  $<BUILD_INTERFACE:$<$<COMPILE_LANG_AND_ID:CXX,Clang>:-Wthread-safety>>)
if(MUOND_WERROR)
  target_compile_options(muond_flags INTERFACE
    $<BUILD_INTERFACE:$<$<COMPILE_LANGUAGE:CXX>:-Werror>>)
endif()

# Instrumentation hides initializations from g++'s analysis, and at -O3 so does the inlining of a
# moved std::variant: it then warns of the standard library. The dev build keeps the warning.
if(MUOND_SANITIZE OR CMAKE_BUILD_TYPE STREQUAL "Release")
  target_compile_options(muond_flags INTERFACE
    $<BUILD_INTERFACE:$<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-maybe-uninitialized>>)
endif()
if(MUOND_SANITIZE STREQUAL "address")
  add_compile_options(-fsanitize=address,undefined -fno-sanitize-recover=undefined
    -fno-omit-frame-pointer)
  add_link_options(-fsanitize=address,undefined)
elseif(MUOND_SANITIZE STREQUAL "thread")
  if(NOT EXISTS "${MUOND_TSAN_LIBRARIES}/libabsl_synchronization.so")
    message(FATAL_ERROR
      "MUOND_SANITIZE=thread needs instrumented libraries: run tests/tsan/build-libraries first")
  endif()
  # DT_RPATH, not RUNPATH: libgrpc must find them, too.
  add_compile_options(-fsanitize=thread -fno-omit-frame-pointer)
  add_link_options(-fsanitize=thread -Wl,--disable-new-dtags "-Wl,-rpath,${MUOND_TSAN_LIBRARIES}")
elseif(MUOND_SANITIZE)
  message(FATAL_ERROR "MUOND_SANITIZE: expected empty, address or thread, got '${MUOND_SANITIZE}'")
endif()
if(MUOND_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    message(FATAL_ERROR "MUOND_FUZZ needs clang: use the preset fuzz")
  endif()
  add_compile_options(-fsanitize=fuzzer-no-link)
endif()

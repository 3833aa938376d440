# CUDA, where it is wanted and there. Sets MUOND_CUDA_FOUND; gives muond_cuda_library.
#
# ON without a working nvcc is an error; AUTO then leaves the CUDA code out and says so.
set(MUOND_CUDA_FOUND OFF)
if(NOT MUOND_CUDA MATCHES "^(ON|OFF|AUTO)$")
  message(FATAL_ERROR "MUOND_CUDA: expected ON, OFF or AUTO, got '${MUOND_CUDA}'")
endif()

if(NOT MUOND_CUDA STREQUAL "OFF")
  # Real code for A100, H100/H200 and B200, PTX for what comes after. Must stand before
  # enable_language, which would fix the compiler's default otherwise.
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES "80-real;90-real;100-real;100-virtual")
  endif()
  if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    find_program(MUOND_NVCC nvcc PATHS ENV CUDA_HOME /usr/local/cuda PATH_SUFFIXES bin)
    if(MUOND_NVCC)
      set(CMAKE_CUDA_COMPILER "${MUOND_NVCC}")
    endif()
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    # CMake 3.25 does not know that nvcc takes C++20.
    if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
    endif()
    set(CMAKE_CUDA_STANDARD 20)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    find_package(CUDAToolkit REQUIRED)
    set(MUOND_CUDA_FOUND ON)
    message(STATUS "CUDA: ${CMAKE_CUDA_COMPILER} ${CMAKE_CUDA_COMPILER_VERSION}, "
      "architectures ${CMAKE_CUDA_ARCHITECTURES}")
  elseif(MUOND_CUDA STREQUAL "ON")
    message(FATAL_ERROR "MUOND_CUDA=ON, but no working nvcc was found. Put nvcc on PATH, set "
      "CUDA_HOME or CUDACXX, or configure with -DMUOND_CUDA=OFF.")
  endif()
endif()

if(NOT MUOND_CUDA_FOUND)
  set(MUOND_CUDA_WHY "MUOND_CUDA=OFF")
  if(MUOND_CUDA STREQUAL "AUTO")
    set(MUOND_CUDA_WHY "MUOND_CUDA=AUTO and no nvcc here")
  endif()
  message(STATUS "")
  message(STATUS "*** THE CUDA CODE IS LEFT OUT of this build: ${MUOND_CUDA_WHY}. ***")
  message(STATUS "")
endif()

# muond_cuda_library(NAME SOURCES ... DEPS ...): a folder of .cu and .cc files that need nothing but
# the CUDA toolkit and DEPS. The runtime is linked statically and libcuda never, so that the program
# starts, and can say what it lacks, on a machine without a driver.
function(muond_cuda_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS" ${ARGN})
  if(NOT MUOND_CUDA_FOUND)
    message(FATAL_ERROR "muond_cuda_library(${name}): call it only where MUOND_CUDA_FOUND")
  endif()
  add_library(${name} STATIC ${ARG_SOURCES})
  set_target_properties(${name} PROPERTIES
    CUDA_RUNTIME_LIBRARY Static
    CUDA_SEPARABLE_COMPILATION OFF)
  target_compile_options(${name} PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:-lineinfo --fmad=false -Xcompiler=-Wall,-Wextra>)
  if(MUOND_WERROR)
    target_compile_options(${name} PRIVATE
      $<$<COMPILE_LANGUAGE:CUDA>:--Werror=all-warnings>)
  endif()
  target_link_libraries(${name} PUBLIC muond_flags CUDA::cudart_static ${ARG_DEPS})
endfunction()

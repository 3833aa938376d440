# The three kinds of target: a library per folder, a program, a test.
include(GoogleTest)

# What ThreadSanitizer must know in every program: some libraries are not instrumented, and their
# own accesses are not ours to judge. See docs/testing.md, "ThreadSanitizer".
set(MUOND_SANITIZER_DEPS "")
if(MUOND_SANITIZE STREQUAL "thread")
  add_library(muond_tsan_options OBJECT "${CMAKE_SOURCE_DIR}/tests/tsan/options.cc")
  set(MUOND_SANITIZER_DEPS muond_tsan_options)
endif()

# muond_library(NAME SOURCES ... DEPS ...): one folder, one library. Headers are found by the
# sources' own #include lines; tests/tidy holds those against the arrows of ARCHITECTURE.md.
function(muond_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS" ${ARGN})
  add_library(${name} STATIC ${ARG_SOURCES})
  target_link_libraries(${name} PUBLIC muond_flags ${ARG_DEPS})
endfunction()

# muond_program(NAME SOURCES ... DEPS ...): a program in build/<preset>/bin.
function(muond_program name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE muond_flags ${MUOND_SANITIZER_DEPS} ${ARG_DEPS})
endfunction()

# muond_test(NAME LABEL unit|conformance|sim|cluster|e2e|gpu SOURCES ... DEPS ... [TIMEOUT s]):
# a GoogleTest binary, each of its tests a ctest entry with that label.
function(muond_test name)
  cmake_parse_arguments(ARG "" "LABEL;TIMEOUT" "SOURCES;DEPS" ${ARGN})
  if(NOT ARG_LABEL)
    message(FATAL_ERROR "muond_test(${name}): LABEL is missing")
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE muond_flags ${MUOND_SANITIZER_DEPS} ${ARG_DEPS}
    GTest::gmock GTest::gtest_main)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/tests")
  gtest_discover_tests(${name}
    WORKING_DIRECTORY "${CMAKE_SOURCE_DIR}"
    DISCOVERY_TIMEOUT 60
    PROPERTIES LABELS ${ARG_LABEL} TIMEOUT ${ARG_TIMEOUT})
endfunction()

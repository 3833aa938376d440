// Checks for programmers' errors. A failed check prints where and why and ends the process: it is
// for what no input may bring about. Bad input gets an absl::Status instead.
#pragma once

#include <string_view>

namespace muond::internal {
[[noreturn]] void CheckFailed(const char* file, int line, const char* condition,
                              std::string_view message);
}  // namespace muond::internal

#define MUOND_CHECK(condition, message)                                            \
  do {                                                                             \
    if (!(condition)) [[unlikely]]                                                 \
      ::muond::internal::CheckFailed(__FILE__, __LINE__, #condition, (message));   \
  } while (false)

// Returns the status of `expression` from the enclosing function unless it is OK.
#define MUOND_RETURN_IF_ERROR(expression)                       \
  do {                                                          \
    if (auto muond_status_ = (expression); !muond_status_.ok()) \
      return muond_status_;                                     \
  } while (false)

#define MUOND_CONCAT_INNER_(a, b) a##b
#define MUOND_CONCAT_(a, b) MUOND_CONCAT_INNER_(a, b)

// MUOND_ASSIGN_OR_RETURN(auto x, F()): x becomes the value of the StatusOr, or its status returns.
#define MUOND_ASSIGN_OR_RETURN(declaration, expression) \
  MUOND_ASSIGN_OR_RETURN_(MUOND_CONCAT_(muond_or_, __LINE__), declaration, expression)
#define MUOND_ASSIGN_OR_RETURN_(result, declaration, expression) \
  auto result = (expression);                                    \
  if (!result.ok()) return std::move(result).status();           \
  declaration = *std::move(result)

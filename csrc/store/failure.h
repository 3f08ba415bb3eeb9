#pragma once

#include <sstream>
#include <stdexcept>

namespace mlx_moe {

// What can go wrong with files and slots.
enum class Failure { corrupt, read, changed, closed, busy, memory };

// The class of mlx_moe.errors that a failure becomes in Python.
inline const char* name_of(Failure failure) {
  static constexpr const char* names[] = {"CorruptFile", "ReadFailed", "FileChanged",
                                          "StoreClosed", "StoreBusy",  "MemoryLimit"};
  return names[int(failure)];
}

struct StoreFailure : std::runtime_error {
  Failure failure;
  StoreFailure(Failure failure, const std::string& message)
      : std::runtime_error(message), failure(failure) {}
};

template <class... Parts>
[[noreturn]] void fail(Failure failure, const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw StoreFailure(failure, message.str());
}

}  // namespace mlx_moe

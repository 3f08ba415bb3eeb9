#pragma once

#include <sstream>
#include <stdexcept>

namespace mlx_moe {

// What can go wrong with files and slots. `kind` names the class of mlx_moe.errors that it becomes
// in Python.
struct StoreFailure : std::runtime_error {
  const char* kind;
  StoreFailure(const char* kind, const std::string& message)
      : std::runtime_error(message), kind(kind) {}
};

namespace failure {
inline constexpr const char* corrupt = "CorruptFile";
inline constexpr const char* read = "ReadFailed";
inline constexpr const char* changed = "FileChanged";
inline constexpr const char* closed = "StoreClosed";
inline constexpr const char* busy = "StoreBusy";
inline constexpr const char* memory = "MemoryLimit";
}  // namespace failure

template <class... Parts>
[[noreturn]] void fail(const char* kind, const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw StoreFailure(kind, message.str());
}

}  // namespace mlx_moe

#pragma once

#include <string>

namespace mlx_moe {

// How something ended: an empty message means well. Errors are values where no exception may pass,
// as between an executor's threads.
struct Status {
  std::string message;
  bool ok() const { return message.empty(); }
};

}  // namespace mlx_moe

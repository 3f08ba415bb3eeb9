#pragma once

#include <stdexcept>
#include <string>

namespace mlx_moe {

// Bad input from the caller; becomes mlx_moe.InvalidArgument in Python.
struct Error : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// An array whose rows do not follow each other; becomes mlx_moe.NotContiguous.
struct NotContiguous : Error {
  using Error::Error;
};

inline void require(bool ok, const std::string& message) {
  if (!ok) throw Error(message);
}

}  // namespace mlx_moe

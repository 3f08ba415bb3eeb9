#pragma once

#include <sstream>
#include <stdexcept>

namespace mlx_moe {

// Bad input from the caller; becomes mlx_moe.InvalidArgument in Python.
struct Error : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// An array whose rows do not follow each other; becomes mlx_moe.NotContiguous.
struct NotContiguous : Error {
  using Error::Error;
};

// An Error whose message is the parts in a row; put together only when it is thrown.
template <class... Parts>
void require(bool ok, const Parts&... parts) {
  if (ok) return;
  std::ostringstream message;
  (message << ... << parts);
  throw Error(message.str());
}

}  // namespace mlx_moe

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "support/status.h"

namespace mlx_moe {

// The static shape of a program: the experts of a group, the width of a token, and the capacities
// that it was compiled for.
struct ProgramShape {
  size_t groups, width;
  std::vector<size_t> capacities;
};

// One dispatch: half-precision x and y [groups, capacity, width], row-contiguous, the caller's
// until the dispatch is done. An executor transposes where its backend wants another order.
struct Dispatch {
  size_t groups, capacity, width;
  const uint16_t* x;
  uint16_t* y;
};

// Something that runs programs of fixed shapes. How a program is loaded is the backend's own affair
// (weights, a compiled package); after that it is a number.
class StaticExecutor {
 public:
  using Done = std::function<void(const Status&)>;

  virtual ~StaticExecutor() = default;

  // Null for a number that no program has.
  virtual const ProgramShape* shape(size_t program) const = 0;

  // Begins the dispatches of tiles of one program and one capacity, which fit its shape, and calls
  // `done` exactly once, from any thread, when every y is written or something went wrong. May
  // return before that. Does not throw.
  virtual void start(size_t program, std::span<const Dispatch> tiles, Done done) = 0;
};

}  // namespace mlx_moe

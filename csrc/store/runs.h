#pragma once

#include <memory>
#include <vector>

#include "store/layout.h"
#include "store/residency.h"

namespace mlx_moe {

// Bytes that one thread reads at one go: they lie together in one file.
struct Run {
  uint32_t file;
  std::vector<Segment> segments;             // rising
  std::vector<std::shared_ptr<Load>> loads;  // of each segment
};

struct Reading {
  std::shared_ptr<Load> load;
  const std::vector<Piece>* pieces;
  uint8_t* slot;
};

// Everything that the loads need, cut into runs that several threads can share, and their
// parts_left. What lies next to each other in a file is read together, for whomever it is.
std::vector<Run> cut_into_runs(const std::vector<Reading>& readings);

}  // namespace mlx_moe

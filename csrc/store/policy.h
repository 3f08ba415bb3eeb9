#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace mlx_moe {

// Which expert goes when a slot is needed. Experts are numbered over all layers.
class Policy {
 public:
  virtual ~Policy() = default;
  // A forward asked for the expert, whether it was there or not.
  virtual void used(uint32_t expert) = 0;
  // Whether expert a goes before b: a strict order.
  virtual bool before(uint32_t a, uint32_t b) const = 0;
};

struct PolicyOptions {
  std::string name = "lru";
  // lfu: all counts are halved after so many uses.
  uint64_t period = 0;
  // lfu: what the counts begin with, in 256ths of a use; empty for nothing.
  std::vector<uint64_t> counts;
  // pinned: these go last.
  std::vector<uint32_t> pinned;
};

// lru: the one whose last use is longest ago. lfu: the one with the smallest count of uses, halved
// now and then; among equals as lru. pinned: lru, but the pinned ones last. Throws Error on an
// unknown name, on lfu without a period, on an expert out of range, on
// counts that are not of all experts.
std::unique_ptr<Policy> make_policy(const PolicyOptions& options, size_t experts);

}  // namespace mlx_moe

#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "store/bank.h"
#include "store/failure.h"
#include "store/layout.h"
#include "store/policy.h"

namespace mlx_moe {

// One expert being read into its slot; whoever waits for it holds it too.
struct Load {
  uint32_t expert;
  size_t parts_left = 0;
  std::optional<Failure> failed;
  std::string message;
  bool done() const { return parts_left == 0; }
};

struct StoreCounts {
  uint64_t hits = 0;              // of experts asked for: were there since an earlier use
  uint64_t misses = 0;            // had to be read first
  uint64_t prefetch_useful = 0;   // were there, or on their way, because read ahead
  uint64_t prefetch_issued = 0;   // reads begun ahead
  uint64_t prefetch_wasted = 0;   // read ahead and evicted without a use
  uint64_t prefetch_dropped = 0;  // asked for ahead, and not begun in time, or without room
  uint64_t evictions = 0;
  uint64_t bytes_read = 0;
  double stall_seconds = 0;     // forwards waited for reads, or for slots in use
  uint64_t resident_bytes = 0;  // slots that are in use, being read into, or hold experts
  uint64_t resident_experts = 0;
};

// Which experts have slots, and who may lose them. Experts are numbered over all layers. Not for
// several threads at a time: the store's lock is held.
class Residency {
 public:
  enum class State : uint8_t { absent, queued, loading, resident };
  struct Entry {
    State state = State::absent;
    bool fresh = false;   // loaded since the last forward of its layer began
    bool unused = false;  // read ahead, and nobody asked for it yet
    uint32_t users = 0;   // forwards that hold it: it stays
    uint8_t* slot = nullptr;
    std::shared_ptr<Load> load;
  };

  Residency(const std::vector<LayerLayout>& layers, size_t budget, const PolicyOptions& policy);
  ~Residency();

  size_t experts() const { return entries_.size(); }
  uint32_t number(size_t layer, size_t expert) const { return first_[layer] + uint32_t(expert); }
  size_t layer_of(uint32_t expert) const { return layer_of_[expert]; }
  size_t bytes_of(uint32_t expert) const { return layers_[layer_of_[expert]].slot_bytes; }
  const Entry& at(uint32_t expert) const { return entries_[expert]; }
  size_t budget() const { return bank_.budget(); }

  // Whether these experts (of one layer) could all be held now, next to what others hold.
  bool fits(std::span<const uint32_t> experts) const;

  // Begins a forward of a layer: tells the policy, holds the experts, and gives slots to those
  // that have none, whose loads are returned. Only after `fits`.
  std::vector<std::shared_ptr<Load>> hold(size_t layer, std::span<const uint32_t> experts);
  void release(std::span<const uint32_t> experts);

  // An absent expert is to be read ahead.
  bool enqueue(uint32_t expert);
  void drop(uint32_t expert);
  // Begins a queued read ahead: null, and dropped, where there is no room. Takes free bytes or,
  // with `evict`, the slot of an expert that is neither held nor fresh.
  std::shared_ptr<Load> begin_ahead(uint32_t expert, bool evict);

  // The bytes are there, or reading failed.
  void finish(const std::shared_ptr<Load>& load);

  StoreCounts counts() const;
  StoreCounts& counters() { return counts_; }

 private:
  enum class Evict { nothing, stale, any };

  bool busy(const Entry& e) const { return e.users || e.state == State::loading; }
  template <class Change>
  void change(uint32_t expert, Change&& change);
  std::shared_ptr<Load> begin(uint32_t expert, Evict evict);
  bool evict(Evict which);
  void begin_forward(size_t layer);

  const std::vector<LayerLayout>& layers_;
  Bank bank_;
  std::unique_ptr<Policy> policy_;
  std::vector<uint32_t> first_, layer_of_;
  std::vector<Entry> entries_;
  std::vector<uint32_t> resident_;  // in no order
  size_t busy_ = 0;                 // bytes that cannot be had
  StoreCounts counts_;
};

}  // namespace mlx_moe

#include "store/policy.h"

#include "support/error.h"

namespace mlx_moe {

namespace {

class Lru : public Policy {
 public:
  explicit Lru(size_t experts) : last_(experts) {}
  void used(uint32_t expert) override { last_[expert] = ++uses_; }
  bool before(uint32_t a, uint32_t b) const override {
    return last_[a] != last_[b] ? last_[a] < last_[b] : a < b;
  }

 protected:
  uint64_t uses_ = 0;
  std::vector<uint64_t> last_;  // 0: never used
};

class Lfu : public Lru {
 public:
  Lfu(size_t experts, uint64_t period, const std::vector<uint64_t>& counts)
      : Lru(experts), period_(period), counts_(counts) {
    counts_.resize(experts);
  }
  void used(uint32_t expert) override {
    Lru::used(expert);
    counts_[expert] += kOne;
    if (uses_ % period_ == 0)
      for (uint64_t& count : counts_) count /= 2;
  }
  bool before(uint32_t a, uint32_t b) const override {
    return counts_[a] != counts_[b] ? counts_[a] < counts_[b] : Lru::before(a, b);
  }

 private:
  static constexpr uint64_t kOne = 256;  // so that halves are not lost
  uint64_t period_;
  std::vector<uint64_t> counts_;
};

class Pinned : public Lru {
 public:
  Pinned(size_t experts, const std::vector<uint32_t>& pinned) : Lru(experts), pinned_(experts) {
    for (uint32_t expert : pinned) {
      require(expert < experts, "pinned expert ", expert, " of ", experts);
      pinned_[expert] = true;
    }
  }
  bool before(uint32_t a, uint32_t b) const override {
    return pinned_[a] != pinned_[b] ? pinned_[b] : Lru::before(a, b);
  }

 private:
  std::vector<bool> pinned_;
};

}  // namespace

std::unique_ptr<Policy> make_policy(const PolicyOptions& options, size_t experts) {
  if (options.name == "lru") return std::make_unique<Lru>(experts);
  if (options.name == "pinned") return std::make_unique<Pinned>(experts, options.pinned);
  require(options.name == "lfu", "unknown policy '", options.name, "'; known: lru, lfu and pinned");
  require(options.period > 0, "lfu needs a period of at least 1 use");
  require(options.counts.empty() || options.counts.size() == experts, "there are ",
          options.counts.size(), " counts for ", experts, " experts");
  return std::make_unique<Lfu>(experts, options.period, options.counts);
}

}  // namespace mlx_moe

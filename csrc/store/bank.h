#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace mlx_moe {

// Page-aligned slots of any sizes under one budget of bytes. Not for several threads at a time.
class Bank {
 public:
  explicit Bank(size_t budget) : budget_(budget) {}
  ~Bank();
  Bank(const Bank&) = delete;
  Bank& operator=(const Bank&) = delete;

  // A slot; null where the budget has no room for it, or the system has no memory. Sizes are whole
  // pages. Slots that were given back keep their memory for the next of their size, as long as the
  // budget has room for it.
  uint8_t* take(size_t size);
  void give(uint8_t* slot, size_t size);

  size_t budget() const { return budget_; }
  size_t used() const { return used_; }

  static size_t whole_pages(size_t size);

 private:
  // Slots of one size lie side by side, so that large pages hold them.
  struct Slots {
    std::vector<uint8_t*> backed, bare;  // free ones, with memory and without
  };

  uint8_t* from(Slots& slots, size_t size);
  void make_room(size_t size);

  size_t budget_, used_ = 0, kept_ = 0;
  std::map<size_t, Slots> slots_;
  std::vector<std::pair<void*, size_t>> reserved_;
};

}  // namespace mlx_moe

#include "store/bank.h"

#include <sys/mman.h>
#include <unistd.h>

namespace mlx_moe {

Bank::~Bank() {
  for (auto& [size, slots] : free_)
    for (uint8_t* slot : slots) munmap(slot, size);
}

uint8_t* Bank::take(size_t size) {
  if (size > budget_ - used_) return nullptr;
  if (auto same = free_.find(size); same != free_.end() && !same->second.empty()) {
    uint8_t* slot = same->second.back();
    same->second.pop_back();
    kept_ -= size;
    used_ += size;
    return slot;
  }
  for (auto& [other, slots] : free_)
    while (!slots.empty() && used_ + kept_ + size > budget_) {
      munmap(slots.back(), other);
      slots.pop_back();
      kept_ -= other;
    }
  void* slot = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (slot == MAP_FAILED) return nullptr;
#if defined(MADV_HUGEPAGE)
  madvise(slot, size, MADV_HUGEPAGE);
#endif
  used_ += size;
  return static_cast<uint8_t*>(slot);
}

void Bank::give(uint8_t* slot, size_t size) {
  used_ -= size;
  kept_ += size;
  free_[size].push_back(slot);
}

size_t Bank::whole_pages(size_t size) {
  static const size_t page = size_t(sysconf(_SC_PAGESIZE));
  return (size + page - 1) / page * page;
}

}  // namespace mlx_moe

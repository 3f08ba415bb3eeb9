#include "store/bank.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

namespace mlx_moe {

namespace {

constexpr size_t kReserve = 64 << 20;  // of addresses at a time; memory comes as it is touched

}  // namespace

Bank::~Bank() {
  for (auto [addresses, size] : reserved_) munmap(addresses, size);
}

uint8_t* Bank::take(size_t size) {
  if (size > budget_ - used_) return nullptr;
  Slots& slots = slots_[size];
  uint8_t* slot = nullptr;
  if (!slots.backed.empty()) {
    slot = slots.backed.back();
    slots.backed.pop_back();
    kept_ -= size;
  } else {
    make_room(size);
    slot = from(slots, size);
  }
  if (slot) used_ += size;
  return slot;
}

void Bank::give(uint8_t* slot, size_t size) {
  used_ -= size;
  kept_ += size;
  slots_[size].backed.push_back(slot);
}

// Takes the memory of free slots of other sizes.
void Bank::make_room(size_t size) {
  for (auto& [other, slots] : slots_)
    while (!slots.backed.empty() && used_ + kept_ + size > budget_) {
      uint8_t* slot = slots.backed.back();
#if defined(__APPLE__)
      // Gives the pages back at once, where MADV_DONTNEED would not.
      mmap(slot, other, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON | MAP_FIXED, -1, 0);
#else
      madvise(slot, other, MADV_DONTNEED);
#endif
      slots.backed.pop_back();
      slots.bare.push_back(slot);
      kept_ -= other;
    }
}

// A slot that has no memory yet.
uint8_t* Bank::from(Slots& slots, size_t size) {
  if (slots.bare.empty()) {
    const size_t count = std::max<size_t>(1, std::min(kReserve, budget_) / size);
    void* addresses = mmap(nullptr, count * size, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (addresses == MAP_FAILED) return nullptr;
#if defined(MADV_HUGEPAGE)
    madvise(addresses, count * size, MADV_HUGEPAGE);
#endif
    reserved_.emplace_back(addresses, count * size);
    for (size_t i = count; i-- > 0;)
      slots.bare.push_back(static_cast<uint8_t*>(addresses) + i * size);
  }
  uint8_t* slot = slots.bare.back();
  slots.bare.pop_back();
  return slot;
}

size_t Bank::whole_pages(size_t size) {
  static const size_t page = size_t(sysconf(_SC_PAGESIZE));
  return (size + page - 1) / page * page;
}

}  // namespace mlx_moe

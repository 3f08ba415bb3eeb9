#include "support/scratch.h"

#include <array>
#include <cstdlib>
#include <memory>
#include <new>

namespace mlx_moe {

namespace {

struct Free {
  void operator()(void* p) const { std::free(p); }
};

struct Buffer {
  std::unique_ptr<void, Free> data;
  size_t size = 0;
};

thread_local std::array<Buffer, 8> buffers;

}  // namespace

void* scratch(size_t slot, size_t bytes) {
  Buffer& b = buffers[slot];
  if (b.size < bytes) {
    size_t size = (bytes + bytes / 4 + 4095) / 4096 * 4096;
    b.size = 0;
    b.data.reset(std::aligned_alloc(4096, size));
    if (!b.data) throw std::bad_alloc();
    b.size = size;
  }
  return b.data.get();
}

}  // namespace mlx_moe

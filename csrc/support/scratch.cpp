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
  int small_requests = 0;  // in a row
};

thread_local std::array<Buffer, 8> buffers;

// A long prompt leaves a large buffer behind: it goes once only small ones are asked for.
constexpr size_t kLarge = 4 << 20;
constexpr int kManyRequests = 1024;

bool outgrown(Buffer& b, size_t bytes) {
  bool small = b.size > kLarge && bytes < b.size / 4;
  b.small_requests = small ? b.small_requests + 1 : 0;
  return b.small_requests > kManyRequests;
}

}  // namespace

void* scratch(size_t slot, size_t bytes) {
  Buffer& b = buffers[slot];
  if (b.size < bytes || outgrown(b, bytes)) {
    size_t size = (bytes + bytes / 4) / 4096 * 4096 + 4096;
    b = {};
    b.data.reset(std::aligned_alloc(4096, size));
    if (!b.data) throw std::bad_alloc();
    b.size = size;
  }
  return b.data.get();
}

}  // namespace mlx_moe

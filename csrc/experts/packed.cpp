#include "experts/packed.h"

#include <algorithm>
#include <cstdint>

#include "experts/kernel.h"
#include "support/cpu.h"
#include "support/error.h"
#include "support/thread_pool.h"

namespace mlx_moe {

namespace {

constexpr size_t kLine = 64;

char* aligned(char* p) {
  return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(p) + kLine - 1) / kLine * kLine);
}

}  // namespace

PackedExperts::PackedExperts(const Matrix& m, const std::vector<size_t>& experts,
                             const PackedExperts* previous)
    : weight_(m.weight), scales_(m.scales), biases_(m.biases) {
  for (size_t e : experts) require(e < m.experts, "expert ", e, " of ", m.experts);
  const Kernel& kernel = kernel_for(chosen_isa(), Scalar::bf16, m);
  if (!kernel.pack_rows) return;
  kernel_ = &kernel;
  copies_.resize(m.experts);
  table_.resize(m.experts);
  const bool shared = previous && previous->kernel_ == kernel_ && previous->table(m);
  size_t size = kernel.packed_bytes(m), each = (m.rows + kernel.block_rows - 1) / kernel.block_rows;
  std::vector<std::pair<size_t, char*>> work;
  for (size_t e : experts) {
    if (table_[e]) continue;
    bytes_ += size;
    if (shared && previous->table_[e]) {
      copies_[e] = previous->copies_[e];
      table_[e] = previous->table_[e];
      continue;
    }
    copies_[e].reset(new char[size + kLine]);
    char* copy = aligned(copies_[e].get());
    table_[e] = copy;
    work.emplace_back(e, copy);
  }
  ThreadPool::shared().run(work.size() * each, [&](size_t i) {
    auto [expert, copy] = work[i / each];
    size_t row = i % each * kernel.block_rows;
    kernel.pack_rows(m, expert, row, std::min(kernel.block_rows, m.rows - row), copy);
  });
}

const void* const* PackedExperts::table(const Matrix& m) const {
  bool same = !m.table && m.weight == weight_ && m.scales == scales_ && m.biases == biases_;
  return same && m.experts == table_.size() ? table_.data() : nullptr;
}

}  // namespace mlx_moe

#include "routing/combine.h"

#include <algorithm>
#include <climits>
#include <string>
#include <vector>

#include "support/error.h"
#include "support/thread_pool.h"

namespace mlx_moe {
namespace {

constexpr size_t kChunk = 16;  // tokens a task

std::vector<int32_t> row_of_assignments(const int32_t* assignments, size_t n, size_t total) {
  std::vector<int32_t> row(total, -1);
  for (size_t i = 0; i < n; ++i) {
    const int32_t a = assignments[i];
    if (a == -1) continue;
    if (size_t(uint32_t(a)) >= total)
      throw Error("assignments[" + std::to_string(i) + "] is " + std::to_string(a) +
                  ", expected -1 or an assignment below " + std::to_string(total));
    if (row[a] >= 0)
      throw Error("assignment " + std::to_string(a) + " is in rows " + std::to_string(row[a]) +
                  " and " + std::to_string(i) + ", expected once");
    row[a] = int32_t(i);
  }
  return row;
}

template <Scalar T>
void add_scaled(const void* row, float score, size_t width, float* out) {
  for (size_t i = 0; i < width; ++i) out[i] += score * load_scalar(T, row, i);
}

using AddScaled = void (*)(const void* row, float score, size_t width, float* out);

AddScaled adder(Scalar type) {
  switch (type) {
    case Scalar::f16:
      return add_scaled<Scalar::f16>;
    case Scalar::bf16:
      return add_scaled<Scalar::bf16>;
    default:
      return add_scaled<Scalar::f32>;
  }
}

}  // namespace

void combine(const Rows& rows, const int32_t* assignments, const float* scores, size_t tokens,
             size_t top_k, bool accumulate, float* out) {
  require(rows.count <= INT32_MAX && tokens <= INT32_MAX / std::max<size_t>(top_k, 1),
          "more than 2147483647 assignments");
  const std::vector<int32_t> row = row_of_assignments(assignments, rows.count, tokens * top_k);
  const AddScaled add = adder(rows.type);
  const char* data = static_cast<const char*>(rows.data);
  const size_t row_bytes = rows.width * size_of(rows.type);
  const auto sum = [&](size_t t) {
    float* to = out + t * rows.width;
    if (!accumulate) std::fill_n(to, rows.width, 0.0f);
    for (size_t a = t * top_k; a < (t + 1) * top_k; ++a)
      if (row[a] >= 0) add(data + size_t(row[a]) * row_bytes, scores[a], rows.width, to);
  };
  ThreadPool::shared().run((tokens + kChunk - 1) / kChunk, [&](size_t chunk) {
    const size_t end = std::min(tokens, (chunk + 1) * kChunk);
    for (size_t t = chunk * kChunk; t < end; ++t) sum(t);
  });
}

}  // namespace mlx_moe

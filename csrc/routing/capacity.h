#pragma once

#include <cstddef>
#include <cstdint>

namespace mlx_moe {

// Buckets as `bucket` makes them: n assignments, offsets has experts + 1 entries.
struct Buckets {
  const int32_t* order;
  size_t n;
  const int32_t* offsets;
  size_t experts;
};

// Throws Error, which names `what`, unless the offsets start at 0, never fall and end at n.
void check_buckets(const char* what, const Buckets& buckets);

// Fills kept_offsets (experts + 1) from the capacities and returns the number kept.
size_t count_kept(const Buckets& buckets, const int32_t* capacities, int32_t* kept_offsets);

// Splits every bucket at its capacity, in bucket order: the first assignments are kept, or, where
// importance (indexed by assignment, n values) is given, those of highest importance with ties to
// the earlier one. `kept` holds count_kept() values and `overflowed` the rest.
// Throws Error on a NaN importance or an assignment outside 0..n-1.
void split(const Buckets& buckets, const int32_t* kept_offsets, const float* importance,
           int32_t* kept, int32_t* overflowed);

}  // namespace mlx_moe

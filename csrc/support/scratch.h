#pragma once

#include <cstddef>

namespace mlx_moe {

// The calling thread's own buffer number `slot` (0..7), at least `bytes` long and 64-byte aligned.
// Its content lasts until the same thread asks for the same slot again.
void* scratch(size_t slot, size_t bytes);

}  // namespace mlx_moe

#pragma once

#include <string>
#include <vector>

namespace mlx_moe {

// Instruction sets that this processor and operating system can run, best first; the last is
// "scalar". "amx" implies AVX-512 with VBMI and BF16 and the kernel's permission to use tiles.
const std::vector<std::string>& usable_isas();

// The best usable one, or the one that MLX_MOE_ISA names (an Error if it cannot run here).
std::string chosen_isa();

// Threads to compute with: MLX_MOE_NUM_THREADS, or the processors this process may run on.
size_t chosen_threads();

}  // namespace mlx_moe

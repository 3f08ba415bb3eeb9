#include "experts/avx512_simd.h"
#include "experts/dot_kernel.h"

namespace mlx_moe {

constinit const Kernel avx512_kernel = DotKernel<Simd>::kernel("avx512");

}  // namespace mlx_moe

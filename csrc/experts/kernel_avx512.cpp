#include "experts/avx512_simd.h"
#include "experts/lane_kernel.h"

namespace mlx_moe {

constinit const Kernel avx512_kernel = LaneKernel<Simd>::kernel("avx512");

}  // namespace mlx_moe

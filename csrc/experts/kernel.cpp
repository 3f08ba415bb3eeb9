#include "experts/kernel.h"

namespace mlx_moe {

const Kernel& kernel_for(const std::string& isa, Scalar activations) {
#if defined(__x86_64__)
  // Tiles multiply bf16: exact enough for half precision, not for float32.
  if (isa == "amx" && activations != Scalar::f32 && amx_kernel.name) return amx_kernel;
  if (isa == "amx" || isa == "avx512") return avx512_kernel;
  if (isa == "avx2") return avx2_kernel;
#elif defined(__aarch64__)
  if (isa == "neon") return neon_kernel;
#endif
  (void)activations;
  return scalar_kernel;
}

}  // namespace mlx_moe

#include "experts/kernel.h"

namespace mlx_moe {

const Kernel& kernel_for(const std::string& isa, Scalar activations, const Matrix& w,
                         size_t tokens) {
#if defined(__x86_64__)
  // Tiles multiply bfloat16: too coarse for float32, and for finer dense weights.
  bool tiles = w.mode == Mode::dense ? activations == Scalar::bf16 && w.type == Scalar::bf16
                                     : activations != Scalar::f32;
  // Activations of 16 bits: too coarse for float32.
  bool codes = w.mode != Mode::dense && w.mode != Mode::mxfp8 && activations != Scalar::f32;
  // A machine with tiles has VNNI too, which has less to prepare.
  if (codes && (isa == "vnni" || (isa == "amx" && tokens <= kFewTokens))) return vnni_kernel;
  if (isa == "amx" && tiles) return amx_kernel;
  if (isa == "amx" || isa == "vnni" || isa == "avx512") return avx512_kernel;
  if (isa == "avx2") return avx2_kernel;
#elif defined(__aarch64__)
  if (isa == "neon") return neon_kernel;
#endif
  (void)activations;
  (void)w;
  (void)tokens;
  return scalar_kernel;
}

}  // namespace mlx_moe

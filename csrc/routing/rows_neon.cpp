#include <arm_neon.h>

#include "routing/rows_simd.h"

namespace mlx_moe {

namespace {

struct Simd {
  using V = float32x4_t;
  static constexpr size_t width = 4, sums = 16;

  static V zero() { return vdupq_n_f32(0.f); }
  static V broadcast(float f) { return vdupq_n_f32(f); }
  static V add(V a, V b) { return vaddq_f32(a, b); }
  static V mul(V a, V b) { return vmulq_f32(a, b); }

  template <Scalar type>
  static V load(const void* p, size_t i) {
    if constexpr (type == Scalar::f32) return vld1q_f32(static_cast<const float*>(p) + i);
    const uint16x4_t h = vld1_u16(static_cast<const uint16_t*>(p) + i);
    if constexpr (type == Scalar::f16) return vcvt_f32_f16(vreinterpret_f16_u16(h));
    return vreinterpretq_f32_u32(vshll_n_u16(h, 16));
  }

  // f32_to_bf16 of half.h.
  static uint16x4_t to_bf16(V v) {
    const uint32x4_t u = vreinterpretq_u32_f32(v);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    const uint32x4_t quiet = vorrq_u32(u, vdupq_n_u32(0x400000));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(v, v), rounded, quiet), 16);
  }

  template <Scalar type>
  static void store(void* p, size_t i, V v) {
    if constexpr (type == Scalar::f32) return vst1q_f32(static_cast<float*>(p) + i, v);
    auto* at = static_cast<uint16_t*>(p) + i;
    if constexpr (type == Scalar::f16)
      vst1_u16(at, vreinterpret_u16_f16(vcvt_f16_f32(v)));
    else
      vst1_u16(at, to_bf16(v));
  }

  // Cores here write whole lines without reading them first: nothing to ask for.
  static void stream_line(const char* from, char* to) { std::memcpy(to, from, 64); }
  static void fence() {}
};

}  // namespace

constinit const RowCode neon_rows = SimdRows<Simd>::code("neon");

}  // namespace mlx_moe

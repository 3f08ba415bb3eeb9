#include <arm_neon.h>

#include "experts/dot_kernel.h"

namespace mlx_moe {

namespace {

struct Simd {
  using V = float32x4_t;
  static constexpr size_t width = 4;
  static constexpr size_t rows = 4;
  static constexpr int tokens = 6;  // 4 rows x 6 tokens + 6 + 1 of 32 registers

  static V zero() { return vdupq_n_f32(0.f); }
  static V load(const float* p) { return vld1q_f32(p); }
  static V fma(V a, V b, V c) { return vfmaq_f32(c, a, b); }
  static V add(V a, V b) { return vaddq_f32(a, b); }
  static V broadcast(float f) { return vdupq_n_f32(f); }
  struct Pair {
    V low, high;
  };
  static void store_pairs(float* p, V even, V odd) {
    const float32x4x2_t pairs = {{even, odd}};  // clang's vst2q is a macro: no braces within
    vst2q_f32(p, pairs);
  }
  static Pair nibble_pairs(const uint8_t* src) {
    uint32_t four;
    __builtin_memcpy(&four, src, 4);
    uint32x4_t b = vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
    return {vcvtq_f32_u32(vandq_u32(b, vdupq_n_u32(15))), vcvtq_f32_u32(vshrq_n_u32(b, 4))};
  }
  static float sum(V v) { return vaddvq_f32(v); }

  static void to_f32(Scalar type, const void* src, size_t n, float* dst) {
    auto* half = static_cast<const uint16_t*>(src);
    size_t i = 0;
    if (type == Scalar::f32) {
      for (; i + 4 <= n; i += 4) vst1q_f32(dst + i, load(static_cast<const float*>(src) + i));
    } else if (type == Scalar::f16) {
      for (; i + 4 <= n; i += 4)
        vst1q_f32(dst + i, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(half + i))));
    } else {
      for (; i + 4 <= n; i += 4)
        vst1q_f32(dst + i, vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(half + i), 16)));
    }
    for (; i < n; ++i) dst[i] = load_scalar(type, src, i);
  }

  static uint16x4_t to_bf16(V v) {
    uint32x4_t u = vreinterpretq_u32_f32(v);
    uint32x4_t odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
    uint32x4_t rounded = vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    uint32x4_t quiet = vorrq_u32(u, vdupq_n_u32(0x400000));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(v, v), rounded, quiet), 16);
  }

  static void from_f32(Scalar type, const float* src, size_t n, void* dst) {
    auto* half = static_cast<uint16_t*>(dst);
    size_t i = 0;
    if (type == Scalar::f32) {
      for (; i + 4 <= n; i += 4) vst1q_f32(static_cast<float*>(dst) + i, load(src + i));
    } else if (type == Scalar::f16) {
      for (; i + 4 <= n; i += 4)
        vst1_u16(half + i, vreinterpret_u16_f16(vcvt_f16_f32(load(src + i))));
    } else {
      for (; i + 4 <= n; i += 4) vst1_u16(half + i, to_bf16(load(src + i)));
    }
    for (; i < n; ++i) store_scalar(type, dst, i, src[i]);
  }

  static void nibbles(const uint8_t* src, size_t n, const int8_t* table, int8_t* dst) {
    const int8x16_t lut = vld1q_s8(table);
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
      uint8x16_t bytes = vld1q_u8(src + i / 2);
      int8x16_t low = vqtbl1q_s8(lut, vandq_u8(bytes, vdupq_n_u8(15)));
      int8x16_t high = vqtbl1q_s8(lut, vshrq_n_u8(bytes, 4));
      const int8x16x2_t pairs = {{low, high}};
      vst2q_s8(dst + i, pairs);
    }
    for (; i < n; i += 2) {
      dst[i] = table[src[i / 2] & 15];
      dst[i + 1] = table[src[i / 2] >> 4];
    }
  }

  static void scale_codes(const int8_t* codes, size_t n, bool is_signed, float scale, float bias,
                          float* dst) {
    const V s = vdupq_n_f32(scale), b = vdupq_n_f32(bias);
    for (size_t i = 0; i < n; i += 8) {
      int8x8_t c = vld1_s8(codes + i);
      int16x8_t wide =
          is_signed ? vmovl_s8(c) : vreinterpretq_s16_u16(vmovl_u8(vreinterpret_u8_s8(c)));
      V low = vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
      V high = vcvtq_f32_s32(vmovl_high_s16(wide));
      vst1q_f32(dst + i, vfmaq_f32(b, low, s));
      vst1q_f32(dst + i + 4, vfmaq_f32(b, high, s));
    }
  }
};

}  // namespace

constinit const Kernel neon_kernel = DotKernel<Simd>::kernel("neon");

}  // namespace mlx_moe

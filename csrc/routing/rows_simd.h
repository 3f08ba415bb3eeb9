#pragma once

// The code of rows.h over a vector type. Each file that includes this has a Simd of its own in an
// unnamed namespace, so that nothing here is shared between instruction sets. They are compiled
// without contraction: a fused product and sum would round once.

#include <cstring>

#include "routing/rows.h"

namespace mlx_moe {

template <class Simd>
struct SimdRows {
  using V = typename Simd::V;
  static constexpr size_t kWidth = Simd::width, kLine = 64;
  static constexpr size_t kBlock = Simd::sums * kWidth;  // columns whose sums stay in registers

  template <Scalar from_type, Scalar to_type>
  static void convert_row(const void* from, void* to, size_t n) {
    size_t i = 0;
    for (; i + kWidth <= n; i += kWidth)
      Simd::template store<to_type>(to, i, Simd::template load<from_type>(from, i));
    for (; i < n; ++i) store_scalar(to_type, to, i, load_scalar(from_type, from, i));
  }

  template <Scalar from_type>
  static void convert_from(const void* from, Scalar to_type, void* to, size_t n) {
    if (to_type == Scalar::f16) return convert_row<from_type, Scalar::f16>(from, to, n);
    if (to_type == Scalar::bf16) return convert_row<from_type, Scalar::bf16>(from, to, n);
    convert_row<from_type, Scalar::f32>(from, to, n);
  }

  static void convert(Scalar from_type, const void* from, Scalar to_type, void* to, size_t n) {
    if (from_type == Scalar::f16) return convert_from<Scalar::f16>(from, to_type, to, n);
    if (from_type == Scalar::bf16) return convert_from<Scalar::bf16>(from, to_type, to, n);
    convert_from<Scalar::f32>(from, to_type, to, n);
  }

  static void copy(const void* from, void* to, size_t bytes) {
    if (bytes) std::memcpy(to, from, bytes);
  }

  static void stream(const void* from, void* to, size_t bytes) {
    auto* src = static_cast<const char*>(from);
    auto* dst = static_cast<char*>(to);
    const size_t head = -reinterpret_cast<uintptr_t>(to) % kLine;
    if (bytes < head + kLine) return copy(from, to, bytes);
    std::memcpy(dst, src, head);
    size_t i = head;
    for (; i + kLine <= bytes; i += kLine) Simd::stream_line(src + i, dst + i);
    std::memcpy(dst + i, src + i, bytes - i);
  }

  static void ask_for(const Terms& next, size_t column, size_t columns) {
    for (size_t j = 0; j < next.count; ++j) {
      const size_t size = size_of(next.data[j].type);
      const char* row = static_cast<const char*>(next.data[j].row) + column * size;
      for (size_t i = 0; i < columns * size; i += kLine) __builtin_prefetch(row + i);
    }
  }

  template <Scalar type, size_t vectors>
  static void add_scaled(const Term& term, size_t at, V (&sums)[vectors]) {
    const V score = Simd::broadcast(term.score);
    for (size_t v = 0; v < vectors; ++v)
      sums[v] = Simd::add(sums[v],
                          Simd::mul(score, Simd::template load<type>(term.row, at + v * kWidth)));
  }

  // `vectors` vectors of the sum, from column `at` on.
  template <Scalar out_type, size_t vectors>
  static void sum_columns(const Terms& terms, size_t at, bool add, void* out) {
    V sums[vectors];
    for (size_t v = 0; v < vectors; ++v)
      sums[v] = add ? Simd::template load<out_type>(out, at + v * kWidth) : Simd::zero();
    for (const Term* term = terms.data; term < terms.data + terms.count; ++term) {
      if (term->type == Scalar::f16)
        add_scaled<Scalar::f16>(*term, at, sums);
      else if (term->type == Scalar::bf16)
        add_scaled<Scalar::bf16>(*term, at, sums);
      else
        add_scaled<Scalar::f32>(*term, at, sums);
    }
    for (size_t v = 0; v < vectors; ++v)
      Simd::template store<out_type>(out, at + v * kWidth, sums[v]);
  }

  static float sum_column(const Terms& terms, size_t at, float sum) {
    for (const Term* term = terms.data; term < terms.data + terms.count; ++term)
      sum += term->score * load_scalar(term->type, term->row, at);
    return sum;
  }

  template <Scalar out_type>
  static void sum_row(const Terms& terms, const Terms& next, size_t n, bool add, void* out) {
    size_t i = 0;
    for (; i + kBlock <= n; i += kBlock) {
      ask_for(next, i, kBlock);
      sum_columns<out_type, Simd::sums>(terms, i, add, out);
    }
    for (; i + kWidth <= n; i += kWidth) sum_columns<out_type, 1>(terms, i, add, out);
    for (; i < n; ++i)
      store_scalar(out_type, out, i,
                   sum_column(terms, i, add ? load_scalar(out_type, out, i) : 0.0f));
  }

  static void sum(const Terms& terms, const Terms& next, size_t n, bool add, Scalar out_type,
                  void* out) {
    if (out_type == Scalar::f16) return sum_row<Scalar::f16>(terms, next, n, add, out);
    if (out_type == Scalar::bf16) return sum_row<Scalar::bf16>(terms, next, n, add, out);
    sum_row<Scalar::f32>(terms, next, n, add, out);
  }

  static constexpr RowCode code(const char* name) {
    return {name, convert, copy, stream, Simd::fence, sum};
  }
};

}  // namespace mlx_moe

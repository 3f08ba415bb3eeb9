#pragma once

#import <CoreML/CoreML.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "dispatch/apple/memory.h"

namespace mlx_moe {

// The memory of one input or output [1, width, 1, columns] of f16. The Neural Engine reads and
// writes IOSurfaces in place and copies anything else. Their rows are along the last axis, so a
// tile [columns, width] is transposed on its way in and out.
class Buffer {
 public:
  // Null if there is no memory. On an IOSurface if `surface` and there is one to be had.
  static std::unique_ptr<Buffer> make(size_t width, size_t columns, bool surface);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  MLMultiArray* array() const { return array_; }
  bool on_surface() const { return surface_ != nullptr; }

  // Not while Core ML has the array. False if the surface cannot be locked.
  bool write(const uint16_t* rows);
  bool read(uint16_t* rows) const;

 private:
  Buffer(size_t width, size_t columns) : width_(width), columns_(columns) {}
  bool on_pages();
  bool on_a_surface();
  template <class Fn>
  bool locked(uint64_t flags, Fn&& fn) const;

  const size_t width_, columns_;
  Strong<MLMultiArray*> array_ = nil;
  CVPixelBufferRef surface_ = nullptr;
  uint16_t* pages_ = nullptr;  // the array's
};

// [1, width, 1, columns]
NSArray<NSNumber*>* coreml_shape(size_t width, size_t columns);

// Reads any array of that shape, whatever its strides, to rows [columns, width]. False if it has
// another shape or type.
bool read_array(MLMultiArray* array, size_t width, size_t columns, uint16_t* rows);

}  // namespace mlx_moe

#import "dispatch/apple/buffer.h"

#include <unistd.h>

#include <cstdlib>

#include "dispatch/transpose.h"

namespace mlx_moe {

std::unique_ptr<Buffer> Buffer::make(size_t width, size_t columns, bool surface) {
  std::unique_ptr<Buffer> buffer(new Buffer(width, columns));
  if ((surface && buffer->on_a_surface()) || buffer->on_pages()) return buffer;
  return nullptr;
}

Buffer::~Buffer() {
  if (surface_) CVPixelBufferRelease(surface_);
}

bool Buffer::on_a_surface() {
  NSDictionary* attributes =
      @{(__bridge NSString*)kCVPixelBufferIOSurfacePropertiesKey : [NSDictionary dictionary]};
  const CVReturn made =
      CVPixelBufferCreate(nullptr, columns_, width_, kCVPixelFormatType_OneComponent16Half,
                          (__bridge CFDictionaryRef)attributes, &surface_);
  if (made != kCVReturnSuccess) surface_ = nullptr;
  if (!surface_) return false;
  array_ = owned([[MLMultiArray alloc] initWithPixelBuffer:surface_
                                                     shape:coreml_shape(width_, columns_)]);
  if (array() != nil) return true;
  CVPixelBufferRelease(std::exchange(surface_, nullptr));
  return false;
}

bool Buffer::on_pages() {
  const size_t page = size_t(sysconf(_SC_PAGESIZE)), bytes = 2 * width_ * columns_;
  void* memory = nullptr;
  if (posix_memalign(&memory, page, (bytes + page - 1) / page * page)) return false;
  pages_ = static_cast<uint16_t*>(memory);
  const size_t all = width_ * columns_;
  // Core ML may keep the array longer than we do, so the memory goes with the array.
  array_ = owned([[MLMultiArray alloc] initWithDataPointer:memory
                                                     shape:coreml_shape(width_, columns_)
                                                  dataType:MLMultiArrayDataTypeFloat16
                                                   strides:@[ @(all), @(columns_), @(columns_), @1 ]
                                               deallocator:^(void* bytes) {
                                                 free(bytes);
                                               }
                                                     error:nullptr]);
  return array() != nil;
}

template <class Fn>
bool Buffer::locked(uint64_t flags, Fn&& fn) const {
  if (!surface_) {
    fn(pages_, columns_);
    return true;
  }
  if (CVPixelBufferLockBaseAddress(surface_, flags) != kCVReturnSuccess) return false;
  auto* base = static_cast<uint16_t*>(CVPixelBufferGetBaseAddress(surface_));
  fn(base, CVPixelBufferGetBytesPerRow(surface_) / sizeof(uint16_t));
  return CVPixelBufferUnlockBaseAddress(surface_, flags) == kCVReturnSuccess;
}

bool Buffer::write(const uint16_t* rows) {
  return locked(0, [&](uint16_t* to, size_t stride) {
    transpose(rows, width_, columns_, width_, to, stride);
  });
}

bool Buffer::read(uint16_t* rows) const {
  return locked(kCVPixelBufferLock_ReadOnly, [&](const uint16_t* from, size_t stride) {
    transpose(from, stride, width_, columns_, rows, width_);
  });
}

NSArray<NSNumber*>* coreml_shape(size_t width, size_t columns) {
  return @[ @1, @(width), @1, @(columns) ];
}

bool read_array(MLMultiArray* array, size_t width, size_t columns, uint16_t* rows) {
  if (array.dataType != MLMultiArrayDataTypeFloat16 ||
      ![array.shape isEqualToArray:coreml_shape(width, columns)])
    return false;
  const size_t by_channel = [array.strides objectAtIndex:1].unsignedLongValue;
  const size_t by_column = [array.strides objectAtIndex:3].unsignedLongValue;
  const size_t last = (width - 1) * by_channel + (columns - 1) * by_column;
  bool whole = false, *found = &whole;
  [array getBytesWithHandler:^(const void* bytes, NSInteger size) {
    *found = last < size_t(size) / sizeof(uint16_t);
    if (!*found) return;
    auto* from = static_cast<const uint16_t*>(bytes);
    if (by_column == 1) return transpose(from, by_channel, width, columns, rows, width);
    for (size_t t = 0; t < columns; ++t)
      for (size_t c = 0; c < width; ++c) rows[t * width + c] = from[c * by_channel + t * by_column];
  }];
  return whole;
}

}  // namespace mlx_moe

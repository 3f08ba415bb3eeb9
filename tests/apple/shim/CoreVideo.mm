#import <CoreVideo/CoreVideo.h>
#import <Foundation/Foundation.h>

#include <cstdlib>

#include "internal.h"

const CFStringRef kCVPixelBufferIOSurfacePropertiesKey = (CFStringRef) @"IOSurfaceProperties";

CVReturn CVPixelBufferCreate(CFAllocatorRef, size_t width, size_t height, OSType format,
                             CFDictionaryRef attributes, CVPixelBufferRef* out) {
  NSDictionary* asked = (NSDictionary*)attributes;
  if (!shim::settings().surfaces || format != kCVPixelFormatType_OneComponent16Half ||
      [asked objectForKey:@"IOSurfaceProperties"] == nil)
    return -6680;
  auto* buffer = new __CVBuffer;
  buffer->width = width;
  buffer->height = height;
  buffer->stride = (width * 2 + 63) / 64 * 64 + 64;  // rows are padded
  buffer->memory.resize(buffer->stride * height);
  shim::live += 1;
  *out = buffer;
  return kCVReturnSuccess;
}

CVPixelBufferRef CVPixelBufferRetain(CVPixelBufferRef buffer) {
  buffer->references += 1;
  return buffer;
}

void CVPixelBufferRelease(CVPixelBufferRef buffer) {
  if (--buffer->references) return;
  shim::live -= 1;
  delete buffer;
}

CVReturn CVPixelBufferLockBaseAddress(CVPixelBufferRef buffer, CVPixelBufferLockFlags) {
  buffer->locks += 1;
  return kCVReturnSuccess;
}

CVReturn CVPixelBufferUnlockBaseAddress(CVPixelBufferRef buffer, CVPixelBufferLockFlags) {
  buffer->locks -= 1;
  return kCVReturnSuccess;
}

void* CVPixelBufferGetBaseAddress(CVPixelBufferRef buffer) {
  return buffer->locks > 0 ? buffer->memory.data() : nullptr;
}

size_t CVPixelBufferGetBytesPerRow(CVPixelBufferRef buffer) { return buffer->stride; }
size_t CVPixelBufferGetWidth(CVPixelBufferRef buffer) { return buffer->width; }
size_t CVPixelBufferGetHeight(CVPixelBufferRef buffer) { return buffer->height; }

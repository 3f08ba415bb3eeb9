// The part of Core Video that we use: pixel buffers on IOSurfaces, which the Neural Engine reads
// and writes in place. Declared after Apple's public documentation.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef const void* CFTypeRef;
typedef const struct __CFAllocator* CFAllocatorRef;
typedef const struct __CFDictionary* CFDictionaryRef;
typedef const struct __CFString* CFStringRef;
typedef struct __attribute__((objc_bridge(id))) __CVBuffer* CVPixelBufferRef;

typedef int32_t CVReturn;
typedef uint32_t OSType;
typedef uint64_t CVPixelBufferLockFlags;
enum { kCVReturnSuccess = 0 };
enum { kCVPixelBufferLock_ReadOnly = 1 };
enum { kCVPixelFormatType_OneComponent16Half = 0x4c303068 };  // 'L00h'

extern const CFStringRef kCVPixelBufferIOSurfacePropertiesKey;

CVReturn CVPixelBufferCreate(CFAllocatorRef allocator, size_t width, size_t height, OSType format,
                             CFDictionaryRef attributes, CVPixelBufferRef* out);
void CVPixelBufferRelease(CVPixelBufferRef buffer);
CVPixelBufferRef CVPixelBufferRetain(CVPixelBufferRef buffer);
CVReturn CVPixelBufferLockBaseAddress(CVPixelBufferRef buffer, CVPixelBufferLockFlags flags);
CVReturn CVPixelBufferUnlockBaseAddress(CVPixelBufferRef buffer, CVPixelBufferLockFlags flags);
void* CVPixelBufferGetBaseAddress(CVPixelBufferRef buffer);
size_t CVPixelBufferGetBytesPerRow(CVPixelBufferRef buffer);
size_t CVPixelBufferGetWidth(CVPixelBufferRef buffer);
size_t CVPixelBufferGetHeight(CVPixelBufferRef buffer);

#ifdef __cplusplus
}
#endif

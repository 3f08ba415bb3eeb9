// The part of Foundation that our Objective-C++ uses, declared after Apple's public documentation,
// to check types and ownership on a machine without Apple's SDK. Nothing here is ever linked.
#pragma once

#include <stdbool.h>
#include <stddef.h>

#define API_AVAILABLE(...) __attribute__((availability(__VA_ARGS__)))
#define NS_ENUM(type, name) \
  enum name : type name;    \
  enum name : type
#define NS_NOESCAPE __attribute__((noescape))
#define NS_UNAVAILABLE __attribute__((unavailable))

typedef long NSInteger;
typedef unsigned long NSUInteger;
typedef bool BOOL;
#define YES __objc_yes
#define NO __objc_no
#ifndef nil
#ifdef __cplusplus
#define nil nullptr
#else
#define nil ((void*)0)
#endif
#endif

typedef struct _NSZone NSZone;
@class NSString, NSDictionary<K, V>;

#pragma clang assume_nonnull begin

@protocol NSObject
- (BOOL)isKindOfClass:(Class)aClass;
- (BOOL)isEqual:(nullable id)object;
@end

__attribute__((objc_root_class))
@interface NSObject<NSObject>
+ (instancetype)alloc;
+ (Class)class;
- (instancetype)init;
@end

@protocol NSCopying
- (id)copyWithZone:(nullable NSZone*)zone;
@end

typedef struct {
  unsigned long state;
  id __unsafe_unretained _Nullable* _Nullable itemsPtr;
  unsigned long* _Nullable mutationsPtr;
  unsigned long extra[5];
} NSFastEnumerationState;

@protocol NSFastEnumeration
- (NSUInteger)countByEnumeratingWithState:(NSFastEnumerationState*)state
                                  objects:(id __unsafe_unretained _Nullable[_Nonnull])buffer
                                    count:(NSUInteger)len;
@end

@interface NSString : NSObject <NSCopying>
+ (nullable instancetype)stringWithUTF8String:(const char*)nullTerminatedCString;
@property(nullable, readonly) const char* UTF8String __attribute__((objc_returns_inner_pointer));
@end

@interface NSNumber : NSObject <NSCopying>
+ (NSNumber*)numberWithUnsignedLong:(unsigned long)value;
+ (NSNumber*)numberWithInt:(int)value;
@property(readonly) unsigned long unsignedLongValue;
@end

@interface NSArray<__covariant T> : NSObject <NSFastEnumeration>
+ (instancetype)arrayWithObjects:(const T _Nonnull[_Nonnull])objects count:(NSUInteger)count;
@property(readonly) NSUInteger count;
- (T)objectAtIndex:(NSUInteger)index;
- (BOOL)isEqualToArray:(NSArray<T>*)otherArray;
@end

@interface NSMutableArray<T> : NSArray <T>
+ (instancetype)arrayWithCapacity:(NSUInteger)numItems;
- (void)addObject:(T)anObject;
@end

@interface NSDictionary<__covariant K, __covariant V> : NSObject <NSFastEnumeration>
+ (instancetype)dictionary;
+ (instancetype)dictionaryWithObjects:(const V _Nonnull[_Nonnull])objects
                              forKeys:(const id<NSCopying> _Nonnull[_Nonnull])keys
                                count:(NSUInteger)count;
@property(readonly) NSUInteger count;
- (nullable V)objectForKey:(K)aKey;
@end

@interface NSURL : NSObject
+ (NSURL*)fileURLWithPath:(NSString*)path;
+ (NSURL*)fileURLWithPath:(NSString*)path isDirectory:(BOOL)isDir;
@property(nullable, readonly, copy) NSString* path;
@end

@interface NSError : NSObject
@property(readonly) NSInteger code;
@property(readonly, copy) NSString* domain;
@property(readonly, copy) NSString* localizedDescription;
@end

@interface NSException : NSObject
@property(readonly, copy) NSString* name;
@property(nullable, readonly, copy) NSString* reason;
@end

#pragma clang assume_nonnull end

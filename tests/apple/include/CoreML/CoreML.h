// The part of Core ML that we use, declared after Apple's public documentation. The check for
// Apple's ABI and the shim that runs on Linux read this one file, so that what runs is what was
// checked.
#pragma once

#import <CoreVideo/CoreVideo.h>
#import <Foundation/Foundation.h>

#ifndef API_AVAILABLE
#define API_AVAILABLE(...)
#endif
#ifdef __APPLE__
#define MLX_MOE_MACOS(version) API_AVAILABLE(macos, introduced = version)
#define SHIM_STATE
#else
#define MLX_MOE_MACOS(version)
#define SHIM_STATE \
  {                \
    void* shim_;   \
  }
#endif

#pragma clang assume_nonnull begin

@class MLModelStructureProgramBlock;

typedef enum MLMultiArrayDataType : NSInteger {
  MLMultiArrayDataTypeDouble = 0x10000 | 64,
  MLMultiArrayDataTypeFloat32 = 0x10000 | 32,
  MLMultiArrayDataTypeFloat16 MLX_MOE_MACOS(12.0) = 0x10000 | 16,
  MLMultiArrayDataTypeInt32 = 0x20000 | 32,
} MLMultiArrayDataType;

typedef enum MLComputeUnits : NSInteger {
  MLComputeUnitsCPUOnly = 0,
  MLComputeUnitsCPUAndGPU = 1,
  MLComputeUnitsAll = 2,
  MLComputeUnitsCPUAndNeuralEngine MLX_MOE_MACOS(13.0) = 3,
} MLComputeUnits;

MLX_MOE_MACOS(10.13)
@interface MLMultiArray : NSObject
SHIM_STATE
@property(readonly, nonatomic) MLMultiArrayDataType dataType;
@property(readonly, nonatomic) NSArray<NSNumber*>* shape;
@property(readonly, nonatomic) NSArray<NSNumber*>* strides;  // in values
- (nullable instancetype)initWithDataPointer:(void*)dataPointer
                                       shape:(NSArray<NSNumber*>*)shape
                                    dataType:(MLMultiArrayDataType)dataType
                                     strides:(NSArray<NSNumber*>*)strides
                                 deallocator:(void (^_Nullable)(void* bytes))deallocator
                                       error:(NSError* _Nullable* _Nullable)error;
- (instancetype)initWithPixelBuffer:(CVPixelBufferRef)pixelBuffer
                              shape:(NSArray<NSNumber*>*)shape MLX_MOE_MACOS(12.0);
- (void)getBytesWithHandler:
    (void (^__attribute__((noescape)))(const void* bytes, NSInteger size))handler
    MLX_MOE_MACOS(12.3);
@end

MLX_MOE_MACOS(10.13)
@interface MLFeatureValue : NSObject
SHIM_STATE
+ (instancetype)featureValueWithMultiArray:(MLMultiArray*)value;
@property(nullable, readonly, nonatomic) MLMultiArray* multiArrayValue;
@end

MLX_MOE_MACOS(10.13)
@protocol MLFeatureProvider <NSObject>
- (nullable MLFeatureValue*)featureValueForName:(NSString*)featureName;
@end

MLX_MOE_MACOS(10.13)
@interface MLDictionaryFeatureProvider : NSObject <MLFeatureProvider>
SHIM_STATE
- (nullable instancetype)initWithDictionary:(NSDictionary<NSString*, id>*)dictionary
                                      error:(NSError* _Nullable* _Nullable)error;
@end

MLX_MOE_MACOS(10.14)
@protocol MLBatchProvider <NSObject>
@property(readonly, nonatomic) NSInteger count;
- (id<MLFeatureProvider>)featuresAtIndex:(NSInteger)index;
@end

MLX_MOE_MACOS(10.14)
@interface MLArrayBatchProvider : NSObject <MLBatchProvider>
SHIM_STATE
- (instancetype)initWithFeatureProviderArray:(NSArray<id<MLFeatureProvider>>*)array;
@end

MLX_MOE_MACOS(10.13)
@interface MLPredictionOptions : NSObject
SHIM_STATE
// By name. An offer: whether it was taken shows in the identity of the result, and a batch never
// takes it. Nobody may hold the lock of a pixel buffer meanwhile.
@property(copy, nonatomic) NSDictionary<NSString*, id>* outputBackings MLX_MOE_MACOS(11.0);
@end

MLX_MOE_MACOS(10.14)
@interface MLModelConfiguration : NSObject
SHIM_STATE
@property MLComputeUnits computeUnits;
@property(nullable, copy, nonatomic) NSString* functionName MLX_MOE_MACOS(15.0);
@end

MLX_MOE_MACOS(10.13)
@interface MLMultiArrayConstraint : NSObject
SHIM_STATE
@property(readonly, nonatomic) NSArray<NSNumber*>* shape;
@property(readonly, nonatomic) MLMultiArrayDataType dataType;
@end

MLX_MOE_MACOS(10.13)
@interface MLFeatureDescription : NSObject
SHIM_STATE
@property(nullable, readonly, nonatomic) MLMultiArrayConstraint* multiArrayConstraint;
@end

MLX_MOE_MACOS(10.13)
@interface MLModelDescription : NSObject
SHIM_STATE
@property(readonly, nonatomic)
    NSDictionary<NSString*, MLFeatureDescription*>* inputDescriptionsByName;
@property(readonly, nonatomic)
    NSDictionary<NSString*, MLFeatureDescription*>* outputDescriptionsByName;
@end

MLX_MOE_MACOS(10.13)
@interface MLModel : NSObject
SHIM_STATE
@property(readonly, nonatomic) MLModelDescription* modelDescription;
+ (nullable MLModel*)modelWithContentsOfURL:(NSURL*)url
                              configuration:(MLModelConfiguration*)configuration
                                      error:(NSError* _Nullable* _Nullable)error
    MLX_MOE_MACOS(10.14);
+ (void)compileModelAtURL:(NSURL*)modelURL
        completionHandler:(void (^)(NSURL* _Nullable compiledURL, NSError* _Nullable error))handler
    MLX_MOE_MACOS(13.0);
- (void)predictionFromFeatures:(id<MLFeatureProvider>)input
                       options:(MLPredictionOptions*)options
             completionHandler:(void (^)(id<MLFeatureProvider> _Nullable output,
                                         NSError* _Nullable error))completionHandler
    MLX_MOE_MACOS(14.0);
- (nullable id<MLBatchProvider>)predictionsFromBatch:(id<MLBatchProvider>)inputBatch
                                             options:(MLPredictionOptions*)options
                                               error:(NSError* _Nullable* _Nullable)error
    MLX_MOE_MACOS(10.14);
@end

MLX_MOE_MACOS(14.0)
@protocol MLComputeDeviceProtocol <NSObject>
@end

MLX_MOE_MACOS(14.0)
@interface MLCPUComputeDevice : NSObject <MLComputeDeviceProtocol>
SHIM_STATE
@end

MLX_MOE_MACOS(14.0)
@interface MLGPUComputeDevice : NSObject <MLComputeDeviceProtocol>
SHIM_STATE
@end

MLX_MOE_MACOS(14.0)
@interface MLNeuralEngineComputeDevice : NSObject <MLComputeDeviceProtocol>
SHIM_STATE
@end

MLX_MOE_MACOS(14.4)
@interface MLModelStructureProgramOperation : NSObject
SHIM_STATE
@property(readonly, copy, nonatomic) NSString* operatorName;
@end

MLX_MOE_MACOS(14.4)
@interface MLModelStructureProgramBlock : NSObject
SHIM_STATE
@property(readonly, copy, nonatomic) NSArray<MLModelStructureProgramOperation*>* operations;
@end

MLX_MOE_MACOS(14.4)
@interface MLModelStructureProgramFunction : NSObject
SHIM_STATE
@property(readonly, nonatomic) MLModelStructureProgramBlock* block;
@end

MLX_MOE_MACOS(14.4)
@interface MLModelStructureProgram : NSObject
SHIM_STATE
@property(readonly, copy, nonatomic)
    NSDictionary<NSString*, MLModelStructureProgramFunction*>* functions;
@end

MLX_MOE_MACOS(14.4)
@interface MLModelStructure : NSObject
SHIM_STATE
@property(nullable, readonly, nonatomic) MLModelStructureProgram* program;
@end

MLX_MOE_MACOS(14.4)
@interface MLComputePlanDeviceUsage : NSObject
SHIM_STATE
@property(readonly, nonatomic) id<MLComputeDeviceProtocol> preferredComputeDevice;
@end

MLX_MOE_MACOS(14.4)
@interface MLComputePlan : NSObject
SHIM_STATE
@property(readonly, nonatomic) MLModelStructure* modelStructure;
+ (void)loadContentsOfURL:(NSURL*)url
            configuration:(MLModelConfiguration*)configuration
        completionHandler:
            (void (^)(MLComputePlan* _Nullable computePlan, NSError* _Nullable error))handler;
- (nullable MLComputePlanDeviceUsage*)computeDeviceUsageForMLProgramOperation:
    (MLModelStructureProgramOperation*)operation;
@end

#pragma clang assume_nonnull end

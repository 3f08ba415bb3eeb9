#!/usr/bin/env bash
# Cross-compiles the whole extension for arm64 macOS and links it, by zig and our declarations: every
# symbol has to be in zig's C library, in Python's, or among those of Apple's that are listed here.
# Minutes long, so no part of check.sh. What comes out is a check and nothing to ship.
#   tests/apple/link.sh BIN BUILD   BIN: a virtual environment's bin with ziglang, nanobind, cmake, ninja
set -euo pipefail
[[ $(uname -s) == Linux ]] || { echo "on a Mac, make test builds the real thing"; exit 1; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
bin=$(cd "$1" && pwd)
mkdir -p "$2/tools" "$2/frameworks"
build=$(cd "$2" && pwd)
zig=$("$bin/python" -c 'import ziglang, pathlib; print(pathlib.Path(ziglang.__file__).parent / "zig")')
export ZIG_GLOBAL_CACHE_DIR=$build/zig ZIG_LOCAL_CACHE_DIR=$build/zig

# zig's linker makes no bundles, and takes no file of symbols that may be undefined, as nanobind has
# of Python's: we make a dylib, and they are in a stub, Python.tbd. CMake asks for an
# install_name_tool, and never runs it.
for tool in cc c++ ar ranlib; do
  cat >"$build/tools/$tool" <<END
#!/usr/bin/env bash
for argument; do
  shift
  case \$argument in
    -Wl,@*darwin-ld-cpython.sym) set -- "\$@" -framework Python ;;
    -bundle) set -- "\$@" -dynamiclib ;;
    *) set -- "\$@" "\$argument" ;;
  esac
done
exec "$zig" $tool "\$@"
END
done
ln -sf /bin/true "$build/tools/install_name_tool"
chmod +x "$build"/tools/{cc,c++,ar,ranlib}

stub() { # stub FRAMEWORK CLASSES SYMBOLS, both with commas
  local of=$build/frameworks/$1.framework
  mkdir -p "$of"
  cat >"$of/$1.tbd" <<END
--- !tapi-tbd
tbd-version: 4
targets: [ arm64-macos ]
install-name: '/System/Library/Frameworks/$1.framework/Versions/A/$1'
exports:
  - targets: [ arm64-macos ]
    symbols: [ ${3:-} ]
    objc-classes: [ ${2:-} ]
...
END
}
# Foundation's stands in for what it re-exports too: Core Foundation and the Objective-C runtime.
stub Foundation \
  'NSArray, NSDictionary, NSException, NSMutableArray, NSNumber, NSString, NSURL' \
  '___CFConstantStringClassReference, _objc_alloc, _objc_alloc_init, _objc_autoreleasePoolPop,
   _objc_autoreleasePoolPush, _objc_autoreleaseReturnValue, _objc_begin_catch, _objc_ehtype_vtable,
   _objc_end_catch, _objc_enumerationMutation, _objc_msgSend, _objc_release, _objc_retain,
   _objc_retainAutorelease, _objc_retainAutoreleasedReturnValue'
stub CoreML \
  'MLArrayBatchProvider, MLCPUComputeDevice, MLComputePlan, MLDictionaryFeatureProvider, MLFeatureValue,
   MLGPUComputeDevice, MLModel, MLModelConfiguration, MLMultiArray, MLNeuralEngineComputeDevice,
   MLPredictionOptions'
stub CoreVideo '' \
  '_CVPixelBufferCreate, _CVPixelBufferGetBaseAddress, _CVPixelBufferGetBytesPerRow,
   _CVPixelBufferLockBaseAddress, _CVPixelBufferRelease, _CVPixelBufferUnlockBaseAddress,
   _kCVPixelBufferIOSurfacePropertiesKey'
stub Accelerate '' "'_cblas_sgemm\$NEWLAPACK'"

symbols=$("$bin/python" -m nanobind --cmake_dir)/darwin-ld-cpython.sym
stub Python '' "$(sed -n 's/^-U //p' "$symbols" | paste -sd, -)"

"$bin/cmake" -S "$here/../.." -B "$build/module" -G Ninja -DCMAKE_MAKE_PROGRAM="$bin/ninja" \
  -DCMAKE_TOOLCHAIN_FILE="$here/darwin.cmake" -DLINK_ROOT="$build" \
  -DPython_EXECUTABLE="$bin/python" >"$build/configure.log" ||
  { cat "$build/configure.log"; exit 1; }
"$bin/cmake" --build "$build/module"
module=("$build"/module/_core*.so)
magic=$(od -An -N8 -tx4 "${module[0]}" | tr -d ' ')
[[ $magic == feedfacf0100000c ]] || { echo "${module[0]} is no arm64 Mach-O: $magic" >&2; exit 1; }
echo "linked: ${module[0]}, $(stat -c %s "${module[0]}") bytes of arm64 Mach-O"

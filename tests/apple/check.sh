#!/usr/bin/env bash
# Proves the Objective-C++ as far as a machine without Apple's SDK can; it says nothing about Core ML.
#   tests/apple/check.sh BIN BUILD    BIN: a virtual environment's bin with ziglang, cmake and ninja
# (a) Types, ownership (ARC) and availability for arm64 macOS 14, by zig's clang and our declarations,
#     down to Mach-O objects.
# (b) The same files, without ARC, with GNUstep and a Core ML of our own: under ASan and UBSan, then
#     plain for the soak.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
csrc=$here/../../csrc
bin=$(cd "$1" && pwd)
mkdir -p "$2"
build=$(cd "$2" && pwd)
[[ $(uname -s) == Linux ]] || { echo "on a Mac, make test builds the real thing"; exit 1; }

compilers() { # clang and GNUstep from Debian, which the block runtime comes from too
  local version
  for version in '' -21 -20 -19 -18 -17 -16; do
    clang=$(command -v "clang$version") && clangxx=$(command -v "clang++$version") && break
    clang=
  done
  echo '#include <doctest/doctest.h>' | c++ -x c++ -E - >/dev/null 2>&1 || return 1
  [[ -n $clang && -e /usr/include/Block.h && -e /usr/include/GNUstep/Foundation/Foundation.h ]] &&
    "$clangxx" -fsanitize=address -x c++ - -o /dev/null <<<'int main() {}' 2>/dev/null
}

install() {
  local sudo=()
  command -v apt-get >/dev/null || { echo "needs clang, GNUstep, a block runtime, doctest" >&2; exit 1; }
  ((EUID == 0)) || sudo=(sudo)
  echo "installing clang and GNUstep"
  "${sudo[@]}" apt-get update -qq
  DEBIAN_FRONTEND=noninteractive "${sudo[@]}" apt-get install -y -qq --no-install-recommends \
    clang-16 libclang-rt-16-dev "libobjc-$(gcc -dumpversion | cut -d. -f1)-dev" \
    libgnustep-base-dev libblocksruntime-dev doctest-dev >/dev/null
  compilers || { echo "clang or GNUstep still cannot be used" >&2; exit 1; }
}

types() {
  local file flags=(-target aarch64-macos.14.0 -fobjc-arc -fblocks -Wall -Wextra -Werror
    -Wunguarded-availability -I"$csrc" -isystem "$here/include" -isystem "$here/foundation" -c)
  mkdir -p "$build/objects"
  export ZIG_GLOBAL_CACHE_DIR=$build/zig ZIG_LOCAL_CACHE_DIR=$build/zig
  for file in coreml.mm apple/buffer.mm apple/model.mm; do
    "$bin/python" -m ziglang c++ "${flags[@]}" -std=c++20 "$csrc/dispatch/$file" \
      -o "$build/objects/$(basename "$file").o"
  done
  "$bin/python" -m ziglang cc "${flags[@]}" "$csrc/dispatch/apple/attempt.m" \
    -o "$build/objects/attempt.m.o"
  echo "types, ARC and availability: fine"
}

run() { # run NAME SANITIZERS
  "$bin/cmake" -S "$here" -B "$build/$1" -G Ninja -DCMAKE_MAKE_PROGRAM="$bin/ninja" \
    -DCMAKE_CXX_COMPILER="$clangxx" -DCMAKE_OBJC_COMPILER="$clang" \
    -DCMAKE_OBJCXX_COMPILER="$clangxx" -DMLX_MOE_SANITIZE="$2" >/dev/null
  "$bin/cmake" --build "$build/$1"
  LSAN_OPTIONS=suppressions=$here/lsan.txt:print_suppressions=0 "$build/$1/apple_tests"
}

compilers || install
types
run asan address,undefined
run plain ''

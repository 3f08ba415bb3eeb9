// A Core ML that is a handful of C++ functions: what the tests set up, and what they ask it.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace shim {

// One function of a compiled model. Values of x and y are row-major in their shapes.
struct Model {
  std::vector<size_t> input, output;
  std::function<void(const std::vector<uint16_t>& x, std::vector<uint16_t>& y)> compute;
  std::string input_name = "x", output_name = "y";
  long type = 0x10010;  // f16
  std::chrono::microseconds duration{0};
  bool loads = true;            // or gives an error
  bool raises_on_load = false;  // or throws an Objective-C exception
  bool predicts = true;         // or gives an error
  bool raises = false;          // or throws an Objective-C exception
  bool raises_on_read = false;  // or gives a result that throws one when it is read
  bool takes_backing = true;    // or gives an array of its own, of strides of its own
  bool last_missing = false;    // batches lack their last result
  std::vector<size_t> given;    // shape of the result, if it is not as promised
  std::vector<std::pair<std::string, std::string>> operations;  // name and unit: ANE GPU CPU ""
};

// The models, by the path of the compiled model and the function's name ("" where it has one).
void install(const std::string& compiled, const std::string& function, Model model);
void uninstall_all();

struct Settings {
  bool surfaces = true;        // pixel buffers can be made
  bool surface_arrays = true;  // arrays can be made of them
};
Settings& settings();

// Objects of Core ML and Core Video that exist. Waits a moment for those of running threads.
long live_objects();

struct Seen {
  size_t predictions, batches, most_at_once;  // the latter in tiles
  size_t locked;  // pixel buffers that somebody had locked while Core ML had them
  size_t units;   // configurations that asked for other units than the Neural Engine and the CPU
};
Seen seen();
void forget_seen();

}  // namespace shim

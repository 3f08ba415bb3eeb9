#include "store/safetensors.h"

#include <algorithm>

#include "store/failure.h"
#include "store/json.h"
#include "support/error.h"

namespace mlx_moe {

namespace {

constexpr uint64_t kLargestHeader = 100 << 20;  // as the format allows

Json read_header(const File& file, uint64_t& data) {
  uint8_t length[8];
  if (file.size() < 8) fail(Failure::corrupt, file.path(), " is too short for a safetensors file");
  const Segment first{0, 8, length};
  file.read({&first, 1});
  uint64_t size = 0;
  for (int i = 0; i < 8; ++i) size |= uint64_t(length[i]) << (8 * i);
  if (size < 2 || size > kLargestHeader || size > file.size() - 8)
    fail(Failure::corrupt, file.path(), ": the safetensors header would have ", size,
         " bytes, the file has ", file.size());
  std::string text(size, '\0');
  const Segment rest{8, size, reinterpret_cast<uint8_t*>(text.data())};
  file.read({&rest, 1});
  data = 8 + size;
  try {
    return parse_json(text);
  } catch (const Error& e) {
    fail(Failure::corrupt, file.path(), ": the safetensors header is ", e.what());
  }
}

// Bytes that the shape asks for; false where that is not a number that could be.
bool bytes_of(const Tensor& t, uint64_t& bytes) {
  bytes = size_of_dtype(t.dtype);
  for (uint64_t n : t.shape)
    if (__builtin_mul_overflow(bytes, n, &bytes)) return false;
  return true;
}

Tensor tensor_of(const std::string& name, const Json& entry, const File& file, uint64_t data) {
  const auto wrong = [&](const auto&... what) {
    fail(Failure::corrupt, file.path(), ": tensor '", name, "' ", what...);
  };
  const Json *dtype = entry.find("dtype"), *shape = entry.find("shape"),
             *range = entry.find("data_offsets");
  if (!dtype || !dtype->text() || !shape || !shape->array() || !range || !range->array() ||
      range->array()->size() != 2)
    wrong("lacks dtype, shape or data_offsets");
  Tensor t{name, *dtype->text(), {}, 0, 0};
  for (const Json& n : *shape->array()) {
    if (!n.number()) wrong("has a shape that is not of whole numbers");
    t.shape.push_back(*n.number());
  }
  const uint64_t *begin = (*range->array())[0].number(), *end = (*range->array())[1].number();
  if (!begin || !end || *begin > *end) wrong("has data_offsets that are no range");
  if (*end > file.size() - data)
    wrong("ends at byte ", *end, " of the data, the file has ", file.size() - data,
          ": it was cut short; download it again");
  t.offset = data + *begin;
  t.size = *end - *begin;
  uint64_t bytes = 0;
  if (size_of_dtype(t.dtype) && (!bytes_of(t, bytes) || bytes != t.size))
    wrong("has ", t.size, " bytes, which is not what its shape and dtype ask for");
  return t;
}

}  // namespace

size_t size_of_dtype(const std::string& dtype) {
  static constexpr struct {
    const char* name;
    size_t size;
  } known[] = {{"F64", 8}, {"I64", 8},  {"U64", 8},     {"F32", 4},     {"I32", 4},    {"U32", 4},
               {"F16", 2}, {"I16", 2},  {"U16", 2},     {"BF16", 2},    {"I8", 1},     {"U8", 1},
               {"C64", 8}, {"BOOL", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F8_E8M0", 1}};
  for (const auto& [name, size] : known)
    if (dtype == name) return size;
  return 0;
}

std::vector<Tensor> read_tensors(const File& file) {
  uint64_t data = 0;
  const Json header = read_header(file, data);
  if (!header.object())
    fail(Failure::corrupt, file.path(), ": the safetensors header is no JSON object");
  std::vector<Tensor> tensors;
  for (const auto& [name, entry] : *header.object())
    if (name != "__metadata__") tensors.push_back(tensor_of(name, entry, file, data));
  std::sort(tensors.begin(), tensors.end(),
            [](const Tensor& a, const Tensor& b) { return a.offset < b.offset; });
  const Tensor* before = nullptr;
  for (const Tensor& t : tensors) {
    if (!t.size) continue;
    if (before && t.offset < before->offset + before->size)
      fail(Failure::corrupt, file.path(), ": tensors '", before->name, "' and '", t.name,
           "' overlap");
    before = &t;
  }
  return tensors;
}

}  // namespace mlx_moe

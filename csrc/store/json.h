#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace mlx_moe {

// A JSON value as far as safetensors headers need it: whole numbers are exact, others are not kept.
struct Json {
  using Array = std::vector<Json>;
  using Object = std::vector<std::pair<std::string, Json>>;  // in order; names are distinct
  struct Other {};                                           // null, true, false, fractions

  std::variant<Other, uint64_t, std::string, Array, Object> value;

  const uint64_t* number() const { return std::get_if<uint64_t>(&value); }
  const std::string* text() const { return std::get_if<std::string>(&value); }
  const Array* array() const { return std::get_if<Array>(&value); }
  const Object* object() const { return std::get_if<Object>(&value); }
  const Json* find(std::string_view name) const;  // null unless an object that has it
};

// Throws Error, which says at which byte, unless the whole text is one JSON value.
Json parse_json(std::string_view text);

}  // namespace mlx_moe

#include "store/json.h"

#include <unordered_set>

#include "support/error.h"

namespace mlx_moe {

namespace {

constexpr int kDeepest = 16;

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Json whole() {
    Json value = any(0);
    space();
    check(at_ == text_.size(), "more than one value");
    return value;
  }

 private:
  void check(bool ok, const char* what) const { require(ok, "no JSON: ", what, " at byte ", at_); }
  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  void space() {
    while (peek() == ' ' || peek() == '\t' || peek() == '\n' || peek() == '\r') ++at_;
  }
  bool took(char c) {
    space();
    if (peek() != c || at_ == text_.size()) return false;
    ++at_;
    return true;
  }

  Json any(int depth) {
    check(depth < kDeepest, "values in each other too deep");
    space();
    switch (peek()) {
      case '{':
        return {object(depth)};
      case '[':
        return {array(depth)};
      case '"':
        return {string()};
      case 't':
        return word("true");
      case 'f':
        return word("false");
      case 'n':
        return word("null");
      default:
        return number();
    }
  }

  Json::Object object(int depth) {
    Json::Object members;
    std::unordered_set<std::string> names;
    ++at_;
    if (took('}')) return members;
    do {
      space();
      check(peek() == '"', "expected a name");
      std::string name = string();
      check(names.insert(name).second, "a name that was there before");
      check(took(':'), "expected ':'");
      members.emplace_back(std::move(name), any(depth + 1));
    } while (took(','));
    check(took('}'), "expected ',' or '}'");
    return members;
  }

  Json::Array array(int depth) {
    Json::Array items;
    ++at_;
    if (took(']')) return items;
    do items.push_back(any(depth + 1));
    while (took(','));
    check(took(']'), "expected ',' or ']'");
    return items;
  }

  Json word(std::string_view expected) {
    check(text_.substr(at_, expected.size()) == expected, "expected a value");
    at_ += expected.size();
    return {};
  }

  Json number() {
    const size_t begin = at_;
    uint64_t n = 0;
    bool exact = true;
    while (peek() >= '0' && peek() <= '9') {
      exact = exact && !__builtin_mul_overflow(n, uint64_t(10), &n) &&
              !__builtin_add_overflow(n, uint64_t(peek() - '0'), &n);
      ++at_;
    }
    check(exact, "a number beyond 64 bits");
    if (std::string_view("-+.eE").find(peek()) == std::string_view::npos || !peek()) {
      check(at_ > begin, "expected a value");
      return {n};
    }
    while (peek() && std::string_view("-+.eE0123456789").find(peek()) != std::string_view::npos)
      ++at_;
    return {};
  }

  std::string string() {
    std::string text;
    ++at_;
    for (;;) {
      check(at_ < text_.size(), "a text without an end");
      const char c = text_[at_++];
      if (c == '"') return text;
      check(uint8_t(c) >= 0x20, "a control character in a text");
      if (c != '\\')
        text += c;
      else
        escaped(text);
    }
  }

  void escaped(std::string& text) {
    static constexpr std::string_view from = "\"\\/bfnrt", to = "\"\\/\b\f\n\r\t";
    const char c = peek();
    ++at_;
    if (c == 'u') return utf8(code_point(), text);
    const size_t i = from.find(c);
    check(i != std::string_view::npos && c, "an unknown escape");
    text += to[i];
  }

  uint32_t four_digits() {
    uint32_t code = 0;
    for (int i = 0; i < 4; ++i, ++at_) {
      const size_t digit = std::string_view("0123456789abcdef").find(char(peek() | 0x20));
      check(digit != std::string_view::npos && peek(), "expected four hexadecimal digits");
      code = code << 4 | uint32_t(digit);
    }
    return code;
  }

  uint32_t code_point() {
    const uint32_t high = four_digits();
    if (high < 0xd800 || high > 0xdfff) return high;
    check(high < 0xdc00 && text_.substr(at_, 2) == "\\u", "half a character");
    at_ += 2;
    const uint32_t low = four_digits();
    check(low >= 0xdc00 && low <= 0xdfff, "half a character");
    return 0x10000 + ((high - 0xd800) << 10) + (low - 0xdc00);
  }

  static void utf8(uint32_t code, std::string& text) {
    if (code < 0x80) {
      text += char(code);
      return;
    }
    const int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    text += char((0xf00 >> (more + 1) & 0xff) | code >> (6 * more));
    for (int i = more - 1; i >= 0; --i) text += char(0x80 | (code >> (6 * i) & 0x3f));
  }

  std::string_view text_;
  size_t at_ = 0;
};

}  // namespace

const Json* Json::find(std::string_view name) const {
  if (const Object* members = object())
    for (const auto& [key, member] : *members)
      if (key == name) return &member;
  return nullptr;
}

Json parse_json(std::string_view text) { return Parser(text).whole(); }

}  // namespace mlx_moe

// SPDX-License-Identifier: Apache-2.0
#include "libraries/json.h"

#include <algorithm>
#include <charconv>
#include <stdexcept>

namespace blade {
namespace {

constexpr int kDeepest = 64;

[[noreturn]] void not_json(const std::string& what) { throw std::runtime_error("its head is no JSON of blade's: " + what); }

void append_utf8(uint32_t code, std::string& text) {
  if (code < 0x80) {
    text += static_cast<char>(code);
  } else if (code < 0x800) {
    text += static_cast<char>(0xC0 | code >> 6);
    text += static_cast<char>(0x80 | (code & 0x3F));
  } else {
    text += static_cast<char>(0xE0 | code >> 12);
    text += static_cast<char>(0x80 | (code >> 6 & 0x3F));
    text += static_cast<char>(0x80 | (code & 0x3F));
  }
}

class JsonParser {
 public:
  explicit JsonParser(std::string_view text) : text_(text) {}

  Json all() {
    Json value = next(0);
    skip_blanks();
    if (at_ != text_.size()) not_json("something follows it");
    return value;
  }

 private:
  void skip_blanks() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t' || text_[at_] == '\r')) ++at_;
  }

  bool take(char c) {
    skip_blanks();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }

  Json next(int depth) {
    if (depth > kDeepest) not_json("it is nested too deep");
    Json value;
    if (take('{')) {
      value.kind = Json::kObject;
      read_sequence('}', [&] {
        std::string name = read_text();
        if (!take(':')) not_json("':' is missing");
        value.members.emplace_back(std::move(name), next(depth + 1));
      });
    } else if (take('[')) {
      value.kind = Json::kList;
      read_sequence(']', [&] { value.items.push_back(next(depth + 1)); });
    } else if (at_ < text_.size() && text_[at_] == '"') {
      value.kind = Json::kText;
      value.text = read_text();
    } else if (!take_word("null")) {
      const bool is_true = take_word("true");
      if (is_true || take_word("false")) {
        value.kind = Json::kTruth;
        value.integer = is_true ? 1 : 0;
      } else {
        read_number(value);
      }
    }
    return value;
  }

  bool take_word(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }

  void read_number(Json& value) {
    const auto end = std::min(text_.find_first_not_of("+-.0123456789eEINafinty", at_), text_.size());  // or Infinity, NaN
    const auto number = text_.substr(at_, end - at_);
    if (number.empty()) not_json("a value is missing");
    const auto [read, error] = std::from_chars(number.data(), number.data() + number.size(), value.integer);
    value.kind = error == std::errc() && read == number.data() + number.size() ? Json::kInteger : Json::kFraction;
    at_ = end;
  }

  template <typename F>
  void read_sequence(char end, const F& read_one) {
    if (take(end)) return;
    do {
      read_one();
    } while (take(','));
    if (!take(end)) not_json("a list or an object does not end");
  }

  std::string read_text() {
    if (!take('"')) not_json("a text is missing");
    std::string text;
    for (; at_ < text_.size() && text_[at_] != '"'; ++at_) {
      if (text_[at_] == '\\') {
        read_escape(text);
      } else {
        text += text_[at_];
      }
    }
    if (at_ >= text_.size()) not_json("a text does not end");
    ++at_;
    return text;
  }

  // `at_` is at the backslash, and then at the last character of what it begins.
  void read_escape(std::string& text) {
    const char kind = ++at_ < text_.size() ? text_[at_] : '\0';
    constexpr std::string_view kNames = "\"\\/bfnrt", kValues = "\"\\/\b\f\n\r\t";
    if (const auto found = kNames.find(kind); kind != '\0' && found != std::string_view::npos) {
      text += kValues[found];
    } else if (kind == 'u') {
      uint32_t code = 0;
      const auto digits = text_.substr(at_ + 1, 4);
      const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), code, 16);
      const bool is_surrogate = code >= 0xD800 && code < 0xE000;
      if (error != std::errc() || end != digits.data() + 4 || is_surrogate) not_json("a character is unknown");
      append_utf8(code, text);
      at_ += 4;
    } else {
      not_json("a character is unknown");
    }
  }

  const std::string_view text_;
  size_t at_ = 0;
};

}  // namespace

const Json* Json::find(std::string_view name) const {
  for (const auto& [key, value] : members) {
    if (key == name) return &value;
  }
  return nullptr;
}

const Json& Json::at(std::string_view name) const {
  if (const Json* found = find(name)) return *found;
  throw std::runtime_error("its head lacks '" + std::string(name) + "'");
}

const std::string& Json::as_text() const {
  if (kind != kText) throw std::runtime_error("its head has something else where a text is due");
  return text;
}

std::vector<std::string> Json::as_texts() const {
  if (kind != kList) throw std::runtime_error("its head has something else where a list is due");
  std::vector<std::string> texts;
  for (const auto& item : items) texts.push_back(item.as_text());
  return texts;
}

Json parse_json(std::string_view text) { return JsonParser(text).all(); }

}  // namespace blade

// SPDX-License-Identifier: Apache-2.0
// A program's text as lines of words, with errors that name the line.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/reason.h"

namespace blade {

inline std::vector<std::string> split(const std::string& text, char by) {
  std::vector<std::string> parts;
  if (text.empty()) return parts;
  size_t start = 0;
  for (size_t at = text.find(by); at != std::string::npos; at = text.find(by, start)) {
    parts.push_back(text.substr(start, at - start));
    start = at + 1;
  }
  parts.push_back(text.substr(start));
  return parts;
}

// Of a program that parses, but asks for what no program may.
[[noreturn]] inline void invalid(const std::string& what) {
  throw Unavailable(Code::kCorruptPayload, "The engine's program is not valid: " + what + ".");
}

class Reader {
 public:
  explicit Reader(const std::string& text) : lines_(split(text, '\n')) {}

  [[noreturn]] void fail(const std::string& what) const {
    throw Unavailable(
        Code::kCorruptPayload,
        "The engine's program does not parse: line " + std::to_string(line_) + ": " + what + ".");
  }

  bool at_end() const { return next_ >= words_.size(); }  // of the line

  std::string word() {
    if (at_end()) fail("ends too early");
    return words_[next_++];
  }

  int64_t to_number(const std::string& text) const {
    size_t used = 0;
    int64_t value = 0;
    try {
      value = std::stoll(text, &used);
    } catch (const std::logic_error&) {
      used = 0;
    }
    if (used == 0 || used != text.size()) fail("'" + text + "' is not an integer");
    return value;
  }

  int64_t number() { return to_number(word()); }

  int64_t below(int64_t value, size_t limit, const char* what) const {
    if (value < 0 || value >= static_cast<int64_t>(limit)) {
      fail(std::string(what) + " " + std::to_string(value) + " is not defined");
    }
    return value;
  }

  int64_t count() {
    const int64_t n = number();
    if (n < 0 || n > 1000000) fail("count " + std::to_string(n) + " is out of range");
    return n;
  }

  void end_of_line() const {
    if (!at_end()) fail("unexpected '" + words_[next_] + "'");
  }

  // The next line, whose first word is `keyword`.
  void expect(const char* keyword) {
    if (line_ > 0) end_of_line();
    if (line_ >= lines_.size()) fail(std::string("'") + keyword + "' is missing");
    next_line();
    header(keyword);
  }

  void header(const char* keyword) {
    if (const auto found = word(); found != keyword) {
      fail("'" + found + "' where '" + keyword + "' is due");
    }
  }

  void header(const char* keyword, int64_t index) {
    header(keyword);
    if (number() != index) fail("ids must count up from 0");
  }

  template <typename F>
  void section(const char* name, const F& parse_line) {
    expect(name);
    const int64_t n = count();
    for (int64_t i = 0; i < n; ++i) {
      end_of_line();
      if (line_ >= lines_.size()) fail("ends too early");
      next_line();
      parse_line(i);
    }
  }

  bool next_begins_with(const char* prefix) const { return line_ < lines_.size() && lines_[line_].rfind(prefix, 0) == 0; }
  const std::string& current_line() const { return lines_[line_ - 1]; }

 private:
  void next_line() {
    words_ = split(lines_[line_++], ' ');
    next_ = 0;
  }

  std::vector<std::string> lines_;
  std::vector<std::string> words_;
  size_t line_ = 0;  // lines read so far
  size_t next_ = 0;  // the next word of the current line
};

}  // namespace blade

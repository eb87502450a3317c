// SPDX-License-Identifier: Apache-2.0
#include "mutate.h"

#include <algorithm>
#include <cstring>

#include "program/reader.h"

namespace fuzz {
namespace {

// What may stand in for a word: ends of ranges, other kinds, words of other places.
const std::vector<std::string> kWords = {
    "", "-", "n", "-1", "0", "1", "2", "3", "7", "63", "64", "65535", "1000000", "1000001", "1099511627776", "2147483647",
    "-2147483648", "9223372036854775807", "-9223372036854775808", "9223372036854775808", "x", "1.5", "f32", "f64", "f16", "bf16",
    "i64", "i8", "u8", "bool", "c64", "f8", "cpu", "cuda", "input", "const", "view", "arena", "output", "dyn", "update", "reuse",
    "dim", "add", "mul", "floordiv", "mod", "scale", "nan", "inf", "1e400", "t:0", "t:1", "t:99", "r:0", "li:r0,r1", "li:", "lt:0,1",
    "lo:n,0", "lf:1,2", "lb:1", "d:cpu", "d:nowhere", "d:meta", "dt:f32", "s:", "i:", "i:-1", "f:x", ":", "aten::add.Tensor",
    "aten::neg.out", "aten::clone", "aten::sum", "aten::nothing", "aten", "::", ".", "fuzz::touch", "call", "draw", "when", "kernel",
    "launch", "number", "slots", "end", "packs", "pack", "guard", "late", "r0",
    "r2", "aten::_local_scalar_dense", "aten::nonzero"};

std::string join(const std::vector<std::string>& parts, char by) {
  std::string text;
  for (size_t i = 0; i < parts.size(); ++i) text += (i > 0 ? std::string(1, by) : "") + parts[i];
  return text;
}

bool is_number(const std::string& word) {
  return !word.empty() && word.size() < 10 && word.find_first_not_of("0123456789") == std::string::npos;
}

void edit_word(std::string& word, Random& draw) {
  if (is_number(word) && draw.chance(60)) {
    const int64_t value = std::stoll(word);
    const int64_t found[] = {value + 1, value - 1, value * 2, -value, static_cast<int64_t>(draw.below(12))};
    word = std::to_string(found[draw.below(5)]);
  } else {
    word = draw.pick(kWords);
  }
}

void edit_line(std::string& line, Random& draw) {
  auto words = blade::split(line, ' ');
  if (words.empty()) words.emplace_back();
  const size_t at = draw.below(words.size());
  const auto place = words.begin() + static_cast<int64_t>(at);
  switch (draw.below(6)) {
    case 0: words.insert(place, draw.pick(kWords)); break;
    case 1: words.erase(place); break;
    case 2: std::swap(words[at], words[draw.below(words.size())]); break;
    default: edit_word(words[at], draw);
  }
  line = join(words, ' ');
}

// After a random instruction, `fuzz::touch` reads and writes all of a slot where ASAN sees it.
void add_touch(std::vector<std::string>& lines, Random& draw) {
  for (size_t i = 0; i < lines.size(); ++i) {
    if (lines[i].rfind("instructions ", 0) != 0 || !is_number(lines[i].substr(13))) continue;
    const size_t count = std::stoul(lines[i].substr(13));
    if (i + count >= lines.size()) return;
    lines[i] = "instructions " + std::to_string(count + 1);
    const auto place = lines.begin() + static_cast<int64_t>(i + 1 + draw.below(count + 1));
    lines.insert(place, "call fuzz::touch 1 t:" + std::to_string(draw.below(24)) + " 0");
    return;
  }
}

}  // namespace

void edit_program(std::string& text, Random& draw) {
  auto lines = blade::split(text, '\n');
  for (size_t n = 1 + draw.below(3); n > 0 && !lines.empty(); --n) {
    const size_t at = draw.below(lines.size());
    switch (draw.below(10)) {
      case 0: lines.erase(lines.begin() + static_cast<int64_t>(at)); break;
      case 1: {
        const std::string copy = draw.pick(lines);
        lines.insert(lines.begin() + static_cast<int64_t>(at), copy);
        break;
      }
      case 2: std::swap(lines[at], lines[draw.below(lines.size())]); break;
      case 3: add_touch(lines, draw); break;
      case 4:
        if (!lines[at].empty()) lines[at][draw.below(lines[at].size())] = static_cast<char>(draw.next());
        break;
      default: edit_line(lines[at], draw);
    }
  }
  if (draw.chance(30)) add_touch(lines, draw);
  text = join(lines, '\n');
  if (draw.chance(2)) text.resize(draw.below(text.size() + 1));
}

std::string without_fills(const std::string& program) {
  auto lines = blade::split(program, '\n');
  for (auto& line : lines) {
    auto words = blade::split(line, ' ');
    if (words.size() < 5 || words[0] != "pack") continue;
    words[4] = "0";
    words.resize(5);
    line = join(words, ' ');
  }
  return join(lines, '\n');
}

}  // namespace fuzz

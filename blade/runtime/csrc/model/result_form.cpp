// SPDX-License-Identifier: Apache-2.0
#include "model/result_form.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <sstream>

namespace blade {
namespace {

// "a | b|c" -> {"a ", " b", "c"}
std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

int64_t to_number(const std::string& text) {
  char* end = nullptr;
  const int64_t number = std::strtoll(text.c_str(), &end, 10);
  TORCH_CHECK(!text.empty() && *end == '\0', "blade: '", text, "' is no number of a result's form");
  return number;
}

// Rounds down, as Python does.
int64_t divided(int64_t a, int64_t b) {
  TORCH_CHECK(b != 0, "blade: a result's size is divided by 0");
  return a / b - static_cast<int64_t>(a % b != 0 && (a < 0) != (b < 0));
}

int64_t applied(char what, int64_t a, int64_t b) {
  switch (what) {
    case '+': return a + b;
    case '-': return a - b;
    case '*': return a * b;
    case '/': return divided(a, b);
    case '%': return a - divided(a, b) * b;
    case 'l': return std::max(a, b);
    default: return std::min(a, b);
  }
}

}  // namespace

PostfixSize::PostfixSize(const std::string& text) {
  size_t depth = 0;
  std::istringstream stream(text);
  for (std::string word; stream >> word;) {
    if (word == "?") {
      tokens_.clear();
      return;
    }
    if (word[0] == 'x') {
      const auto dot = word.find('.');
      TORCH_CHECK(dot != std::string::npos, "blade: '", word, "' is no axis of an input");
      tokens_.push_back({'x', to_number(word.substr(1, dot - 1)), to_number(word.substr(dot + 1))});
      ++depth;
    } else if (word == "+" || word == "-" || word == "*" || word == "//" || word == "%" || word == "max" || word == "min") {
      TORCH_CHECK(depth >= 2, "blade: '", text, "' has an operator too many");
      tokens_.push_back({word == "max" ? 'l' : word[0]});
      --depth;
    } else {
      tokens_.push_back({'0', to_number(word)});
      ++depth;
    }
  }
  TORCH_CHECK(depth == 1, "blade: '", text, "' is no size of a result");
}

int64_t PostfixSize::evaluate(const std::vector<at::Tensor>& inputs) const {
  std::vector<int64_t> stack;
  for (const auto& token : tokens_) {
    if (token.what == '0') {
      stack.push_back(token.number);
    } else if (token.what == 'x') {
      stack.push_back(inputs.at(token.number).size(token.axis));
    } else {
      const int64_t b = stack.back();
      stack.pop_back();
      stack.back() = applied(token.what, stack.back(), b);
    }
  }
  return stack.back();
}

ResultForm::ResultForm(const std::string& line) {
  const auto fields = split(line, '|');
  TORCH_CHECK(fields.size() >= 2, "blade: '", line, "' is no form of a result");
  std::istringstream axes(fields[1]);
  for (std::string axis; axes >> axis;) order_.push_back(to_number(axis));
  const auto rank = order_.size();
  auto sorted = order_;
  std::sort(sorted.begin(), sorted.end());
  for (size_t k = 0; k < rank; ++k) TORCH_CHECK(sorted[k] == static_cast<int64_t>(k), "blade: '", line, "' has no order of axes");
  TORCH_CHECK(fields.size() == rank + 2, "blade: '", line, "' has not a size per axis");
  inverse_.resize(rank);
  for (size_t k = 0; k < rank; ++k) inverse_[order_[k]] = static_cast<int64_t>(k);
  for (size_t k = 0; k < rank; ++k) sizes_.emplace_back(fields[k + 2]);
}

std::string ResultForm::why_not(const at::Tensor& result, const std::vector<at::Tensor>& inputs) const {
  for (size_t axis = 0; axis < sizes_.size(); ++axis) {
    if (!sizes_[axis].is_known()) continue;
    const int64_t want = sizes_[axis].evaluate(inputs), got = result.size(static_cast<int64_t>(axis));
    if (got != want) return "axis " + std::to_string(axis) + " has the size " + std::to_string(got) + ", not " + std::to_string(want);
  }
  return "";
}

at::Tensor ResultForm::laid_out(const at::Tensor& result) const {
  TORCH_CHECK(
      result.dim() == static_cast<int64_t>(order_.size()), "blade: a result has ", result.dim(), " dimensions, not ", order_.size());
  if (result.is_contiguous() && std::is_sorted(order_.begin(), order_.end())) return result;
  const auto ordered = result.permute(order_);
  return ordered.is_contiguous() ? result : ordered.contiguous().permute(inverse_);
}

std::vector<ResultForm> read_forms(const std::string& text) {
  std::vector<ResultForm> forms;
  for (const auto& line : split(text, '\n')) forms.emplace_back(line);
  return forms;
}

std::vector<SizeRelation> read_relations(const std::string& text) {
  std::vector<SizeRelation> relations;
  for (const auto& line : split(text, '\n')) {
    const auto fields = split(line, '|');
    TORCH_CHECK(fields.size() == 2, "blade: '", line, "' is no relation between sizes");
    relations.push_back({fields[0], PostfixSize(fields[1])});
  }
  return relations;
}

}  // namespace blade

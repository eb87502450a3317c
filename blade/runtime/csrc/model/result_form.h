// SPDX-License-Identifier: Apache-2.0
// What a method of a Model returns, as text that C++ and Python (blade/runtime/result_form.py) read: a line per result,
//
//   float32 cpu | 0 1 2 | x0.0 | x0.1 2 // | 64
//
// dtype and device, the axes from the outermost in memory to the innermost, then a size per axis. A size is a number
// in postfix notation: constants, `xI.A` for axis A of input I, and the operators + - * // % max min; or `?`, unknown
// before the call.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

namespace blade {

// A number in postfix notation.
class PostfixSize {
 public:
  // Throws where the text is none.
  explicit PostfixSize(const std::string& text);
  bool is_known() const { return !tokens_.empty(); }
  int64_t evaluate(const std::vector<at::Tensor>& inputs) const;

 private:
  struct Token {
    char what;  // a digit stands for a constant, x for an axis, else an operator's first letter
    int64_t number = 0, axis = 0;
  };
  std::vector<Token> tokens_;
};

class ResultForm {
 public:
  // Throws where the text is none.
  explicit ResultForm(const std::string& line);

  // Empty if `result` is what the form says at these inputs, else a sentence.
  std::string why_not(const at::Tensor& result, const std::vector<at::Tensor>& inputs) const;

  // The same values in the memory order of the form: `result` itself if it lies so.
  at::Tensor laid_out(const at::Tensor& result) const;

 private:
  std::vector<int64_t> order_, inverse_;
  std::vector<PostfixSize> sizes_;
};

// What has to hold between the sizes of a graph's inputs, as a line "text | number": the number is not negative.
struct SizeRelation {
  std::string text;
  PostfixSize number;
};

std::vector<SizeRelation> read_relations(const std::string& text);

// One per line.
std::vector<ResultForm> read_forms(const std::string& text);

}  // namespace blade

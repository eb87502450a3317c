// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <cstring>

#include "mutate.h"

namespace fuzz {
namespace {

const std::vector<std::string> kNumbers = {"checksum",    "max_failures",   "max_shapes",  "max_idle_bytes",       "watch_constants",
                                           "cuda_graphs", "max_graphs",     "nothing",     "reuse_output_buffers", ""};

// Sizes, strides and an offset that its memory need not have: torch's reader of files takes them as they are.
at::Tensor misplaced(const at::Tensor& tensor, Random& draw) {
  auto copy = tensor.detach();
  auto sizes = copy.sizes().vec(), strides = copy.strides().vec();
  int64_t offset = copy.storage_offset();
  if (sizes.empty()) sizes = strides = {1};
  auto& one = draw.chance(60) ? sizes : strides;
  const auto value = static_cast<int64_t>(draw.number());
  draw.chance(80) ? (one[draw.below(one.size())] = value) : (offset = value);
  try {
    copy.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  } catch (const c10::Error&) {  // torch itself makes no such tensor
    return tensor;
  }
  return copy;
}

// A misplaced tensor is not computed with: that would be torch's fault.
bool is_whole(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.is_meta()) return false;
  return tensor.is_contiguous() && tensor.storage_offset() == 0 && tensor.nbytes() <= tensor.storage().nbytes();
}

at::Tensor changed(const at::Tensor& tensor, Random& draw) {
  if (!is_whole(tensor)) return at::rand({3});
  static const std::vector<at::ScalarType> dtypes = {at::kFloat, at::kDouble, at::kHalf,         at::kChar, at::kByte,
                                                     at::kLong,  at::kBool,   at::kComplexFloat, at::kInt,  at::kBFloat16};
  const auto flat = tensor.reshape({-1});
  switch (draw.below(15)) {
    case 0: return at::Tensor();
    case 1: return flat.slice(0, 0, static_cast<int64_t>(draw.below(static_cast<size_t>(flat.numel()) + 1)));
    case 2: return tensor.dim() > 1 ? tensor.transpose(0, -1) : tensor.unsqueeze(0);
    case 3: return tensor.to(draw.pick(dtypes));
    case 4: return tensor.unsqueeze(-1).expand([&] { auto sizes = tensor.sizes().vec(); sizes.push_back(3); return sizes; }());
    case 5: return at::empty({0}, tensor.options());
    case 6: return tensor.dim() > 0 ? tensor.to_sparse() : tensor;
    case 7: return at::empty(tensor.sizes(), tensor.options().device(at::kMeta));
    case 8: return tensor.is_floating_point() ? tensor.detach().requires_grad_() : tensor;
    case 9: return tensor.scalar_type() == at::kFloat ? at::quantize_per_tensor(tensor, 0.1, 0, at::kQInt8) : tensor;
    case 10: return flat.slice(0, static_cast<int64_t>(draw.below(static_cast<size_t>(flat.numel()) + 1)));
    case 11: return at::_conj(tensor.to(at::kComplexFloat));
    default: return misplaced(tensor, draw);
  }
}

void edit_words(std::vector<std::string>& words, Random& draw) {
  if (words.empty()) return words.push_back("disc");
  auto& word = words[draw.below(words.size())];
  switch (draw.below(5)) {
    case 0: words.pop_back(); break;
    case 1: words.push_back(word); break;
    case 2: std::swap(word, words[draw.below(words.size())]); break;
    case 3: word = draw.pick(std::vector<std::string>{"", "disc", "echo", "pending", "nothing", std::string(70000, 'x')}); break;
    default: edit_program(words.back(), draw);
  }
}

void edit_tensors(std::vector<at::Tensor>& tensors, Random& draw) {
  if (tensors.empty()) return tensors.push_back(at::rand({2}));
  const size_t at = draw.below(tensors.size());
  switch (draw.below(8)) {
    case 0: tensors.erase(tensors.begin() + static_cast<int64_t>(at)); break;
    case 1: tensors.push_back(tensors[at]); break;
    case 2: std::swap(tensors[at], tensors[draw.below(tensors.size())]); break;
    default:
      try {
        tensors[at] = changed(tensors[at], draw);
      } catch (const std::exception&) {  // torch makes no such tensor of this one
        tensors[at] = at::Tensor();
      }
  }
}

}  // namespace

void edit_state(State& state, Random& draw) {
  auto& [version, words, numbers, tensors] = state;
  for (size_t n = 1 + draw.below(2); n > 0; --n) {
    switch (draw.below(10)) {
      case 0: version = static_cast<int64_t>(draw.number()); break;
      case 1: edit_words(words, draw); break;
      case 2: (void)numbers.erase(draw.pick(kNumbers)); break;
      case 3:
      case 4: numbers.insert_or_assign(draw.pick(kNumbers), static_cast<int64_t>(draw.number())); break;
      default: edit_tensors(tensors, draw);
    }
  }
}

at::Tensor to_tensor(const std::string& bytes) {
  auto tensor = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  if (!bytes.empty()) std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
  return tensor;
}

std::string to_bytes(const at::Tensor& tensor) {
  return std::string(static_cast<const char*>(tensor.const_data_ptr()), static_cast<size_t>(tensor.numel()));
}

}  // namespace fuzz

// SPDX-License-Identifier: Apache-2.0
#include "execute/input_updates.h"

#include <ATen/MemoryOverlap.h>

#include <algorithm>

namespace blade {
namespace {

struct Range {
  const char* begin;
  const char* end;
  bool updated;
};

// From the first element to one past the last, whatever lies between.
Range range_of(const at::Tensor& tensor, bool updated) {
  const auto* begin = static_cast<const char*>(tensor.const_data_ptr());
  int64_t last = 0;
  for (int64_t axis = 0; axis < tensor.dim(); ++axis) last += (tensor.size(axis) - 1) * tensor.stride(axis);
  return {begin, begin + (last + 1) * static_cast<int64_t>(tensor.itemsize()), updated};
}

// Whether a range that is updated meets another one.
bool meet(std::vector<Range>& ranges) {
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  const char* end = nullptr;          // of all so far
  const char* updated_end = nullptr;  // of those that are updated
  for (const Range& range : ranges) {
    if (range.begin < updated_end || (range.updated && range.begin < end)) return true;
    end = std::max(end, range.end);
    if (range.updated) updated_end = std::max(updated_end, range.end);
  }
  return false;
}

}  // namespace

bool may_update(
    const Program& program, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& constants) {
  if (program.updated.empty()) return true;
  std::vector<Range> ranges;
  ranges.reserve(inputs.size() + constants.size());
  const auto& updated = program.updated;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const bool written = std::binary_search(updated.begin(), updated.end(), static_cast<int64_t>(i));
    // outside of inference mode nobody may write to its tensors; expanded ones are written to by nobody
    if (written && (inputs[i].is_inference() || at::has_internal_overlap(inputs[i]) == at::MemOverlap::Yes)) return false;
    if (inputs[i].numel() > 0) ranges.push_back(range_of(inputs[i], written));
  }
  for (const auto& constant : constants) {
    if (constant.numel() > 0) ranges.push_back(range_of(constant, false));
  }
  return !meet(ranges);
}

void finish_updates(
    const Program& program, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& ready) {
  for (const int64_t i : program.updated) {
    if (!ready[i].is_same(inputs[i])) inputs[i].copy_(ready[i]);
    inputs[i].unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace blade

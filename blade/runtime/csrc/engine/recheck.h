// SPDX-License-Identifier: Apache-2.0
// Some calls are answered by both, engine and original (Config.recheck): an engine that was right when it was verified
// and is not any more is found out.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <string>
#include <vector>

namespace blade {

class Recheck {
 public:
  // Every so many answers (0: none); what two answers may differ by, in 1e-9 of the largest magnitude; how many in a row
  // may differ by more before the engine is retired.
  void set(int64_t every, int64_t tolerance, int64_t max_failures);

  bool is_on() const { return every_ > 0; }
  int64_t count() const { return count_.load(std::memory_order_relaxed); }

  // Of the answer that was just given. After one that differed, all are, until one agrees.
  bool is_due();

  // Empty, or how the answers differ. Throws nothing: what cannot be compared differs.
  std::string compare(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& want);

  bool is_retired() const { return every_ > 0 && failures_.load(std::memory_order_relaxed) >= max_failures_; }
  void forget() { failures_ = 0; }

 private:
  int64_t every_ = 0, tolerance_ = 0, max_failures_ = 3;
  std::atomic<int64_t> answers_{0}, count_{0}, failures_{0};
};

}  // namespace blade

// SPDX-License-Identifier: Apache-2.0
// Memory that graphs leave results in and that callers are lent: they read it where it is, and no graph writes to it
// before all of them have let go. What forward saves for backward, a graph as well, is neither copied nor kept twice.
#pragma once

#include <ATen/core/Tensor.h>

#include "frame.h"

namespace blade {

// A storage that is known to be lent as long as this lives.
class Lent {
 public:
  explicit Lent(const c10::Storage& storage);
  ~Lent();
  Lent(const Lent&) = delete;
  Lent& operator=(const Lent&) = delete;

  // Everybody who holds it now does so for good.
  void settle() { holders_ = storage_.use_count(); }

  // Somebody else holds it.
  bool is_out() const { return storage_.use_count() > holders_; }

 private:
  const c10::Storage storage_;
  size_t holders_ = 0;
};

// Whether `tensor` is what a graph lent: it is likely to be there at another call, too.
bool is_lent(const at::Tensor& tensor);

// What the graphs of a lane lend, of one shape at a time. Two that are out at once take two of these.
class Generation {
 public:
  explicit Generation(c10::DeviceType type) : arena_(type), lent_(arena_.storage()) { lent_.settle(); }
  bool is_out() const { return lent_.is_out(); }
  void reserve(size_t bytes) { arena_.reserve(bytes); }  // only while it is not out
  const Arena& arena() const { return arena_; }

 private:
  Arena arena_;
  Lent lent_;
};

}  // namespace blade

// SPDX-License-Identifier: Apache-2.0
// Memory that graphs leave results in and that callers are lent: they read it where it is, and no graph writes to it
// before all of them have let go. What forward saves for backward, a graph as well, is neither copied nor kept twice.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>

#include "execute/execution_plan.h"

namespace blade {

// What callers were lent and have not let go of.
class Loans {
 public:
  // `memory` for one call: a storage of its own, which keeps that one alive. References to `memory` itself tell nothing:
  // one whose storage Python has seen once keeps a reference for good.
  c10::Storage lend(const c10::Storage& memory);

  // Something that no caller gives back is out until this ends.
  void hold() { out_->fetch_add(1, std::memory_order_relaxed); }

  bool is_out() const { return out_->load(std::memory_order_acquire) > 0; }
  std::weak_ptr<const std::atomic<int64_t>> count() const { return out_; }

 private:
  std::shared_ptr<std::atomic<int64_t>> out_ = std::make_shared<std::atomic<int64_t>>(0);
};

// Whether `tensor` is what a graph lent: it is likely to be there at another call, too.
bool is_borrowed(const at::Tensor& tensor);

// What the graphs of a stream context lend, of one shape at a time. Two that are out at once take two of these.
class BufferSet {
 public:
  explicit BufferSet(c10::DeviceType type) : arena_(type) {}
  c10::Storage lend() { return loans_.lend(arena_.storage()); }
  bool is_out() const { return loans_.is_out(); }
  void reserve(size_t bytes) { arena_.reserve(bytes); }  // only while it is not out
  const Arena& arena() const { return arena_; }

 private:
  Arena arena_;
  Loans loans_;
};

}  // namespace blade

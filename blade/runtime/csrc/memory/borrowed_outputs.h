// SPDX-License-Identifier: Apache-2.0
// Memory that graphs leave results in and that callers are lent: they read it where it is, and no graph writes to it
// before all of them have let go. What forward saves for backward, a graph as well, is neither copied nor kept twice.
#pragma once

#include <ATen/core/Tensor.h>

#include "execute/execution_plan.h"

namespace blade {

// A storage that is known to be lent as long as this lives.
class BorrowedStorage {
 public:
  explicit BorrowedStorage(const c10::Storage& storage);
  ~BorrowedStorage();
  BorrowedStorage(const BorrowedStorage&) = delete;
  BorrowedStorage& operator=(const BorrowedStorage&) = delete;

  // Everybody who holds it now does so for good.
  void settle() { holders_ = storage_.use_count(); }

  // Somebody else holds it.
  bool is_out() const { return storage_.use_count() > holders_; }

 private:
  const c10::Storage storage_;
  size_t holders_ = 0;
};

// Whether `tensor` is what a graph lent: it is likely to be there at another call, too.
bool is_borrowed(const at::Tensor& tensor);

// What the graphs of a stream context lend, of one shape at a time. Two that are out at once take two of these.
class BufferSet {
 public:
  explicit BufferSet(c10::DeviceType type) : arena_(type), borrowed_(arena_.storage()) { borrowed_.settle(); }
  bool is_out() const { return borrowed_.is_out(); }
  void reserve(size_t bytes) { arena_.reserve(bytes); }  // only while it is not out
  const Arena& arena() const { return arena_; }

 private:
  Arena arena_;
  BorrowedStorage borrowed_;
};

}  // namespace blade

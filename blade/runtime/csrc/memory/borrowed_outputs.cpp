// SPDX-License-Identifier: Apache-2.0
#include "memory/borrowed_outputs.h"

#include <utility>

namespace blade {
namespace {

struct Loan {
  c10::Storage memory;
  std::shared_ptr<std::atomic<int64_t>> out;
};

void give_back(void* context) {
  const std::unique_ptr<Loan> loan(static_cast<Loan*>(context));
  loan->out->fetch_sub(1, std::memory_order_release);
}

}  // namespace

c10::Storage Loans::lend(const c10::Storage& memory) {
  auto loan = std::make_unique<Loan>(Loan{memory, out_});
  out_->fetch_add(1, std::memory_order_relaxed);
  void* data = const_cast<void*>(memory.data());
  c10::DataPtr owner(data, loan.release(), &give_back, memory.device());
  return c10::Storage(
      c10::Storage::use_byte_size_t(), memory.nbytes(), std::move(owner), /*allocator=*/nullptr, /*resizable=*/false);
}

bool is_borrowed(const at::Tensor& tensor) {
  return tensor.storage().data_ptr().get_deleter() == &give_back;
}

}  // namespace blade

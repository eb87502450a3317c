// SPDX-License-Identifier: Apache-2.0
// Tensors and memory on the CPU or on the current accelerator, without the dispatcher's cost.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Allocator.h>

#include "memory/huge_pages.h"

namespace blade {

// Several tensors in one piece of memory begin at multiples of this, as torch's own allocations do.
constexpr size_t kOwnAlign = 256;
inline size_t of_its_own(size_t bytes) { return (bytes + kOwnAlign - 1) / kOwnAlign * kOwnAlign; }

inline c10::DispatchKeySet keys_of(c10::DeviceType type) {
  return c10::DispatchKeySet(type == at::kCPU ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA);
}

// Kernels of an accelerator may rely on it for whole tensors: torch's own allocations have more.
inline bool is_aligned(const at::Tensor& tensor) {
  constexpr uintptr_t kAlignment = 16;
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kAlignment == 0;
}

// Whether what `tensor` is lies in its memory: not negated or conjugated when read, nor zeros that have none.
inline bool is_memory(const at::Tensor& tensor) {
  return !tensor.is_conj() && !tensor.is_neg() && !tensor._is_zerotensor();
}

// `tensor` itself, or a copy that is so.
inline at::Tensor as_memory(const at::Tensor& tensor) {
  if (tensor._is_zerotensor()) return at::zeros(tensor.sizes(), tensor.options());
  return tensor.resolve_conj().resolve_neg();
}

// On the current device and stream, as torch's own results.
inline c10::DataPtr allocate_memory(c10::DeviceType type, size_t bytes) {
  return type == at::kCPU ? allocate_pages(bytes) : c10::GetAllocator(type)->allocate(bytes);
}

inline at::Tensor empty_tensor(c10::DeviceType type, at::IntArrayRef sizes, at::ScalarType dtype) {
  if (type == at::kCPU) return at::detail::empty_cpu(sizes, dtype);
  return at::detail::empty_generic(sizes, c10::GetAllocator(type), keys_of(type), dtype, std::nullopt);
}

inline at::Tensor empty_strided_tensor(
    c10::DeviceType type, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  if (type == at::kCPU) return at::detail::empty_strided_cpu(sizes, strides, dtype);
  return at::detail::empty_strided_generic(sizes, strides, c10::GetAllocator(type), keys_of(type), dtype);
}

// `offset` counts elements.
inline at::Tensor tensor_over(
    const c10::Storage& storage, at::ScalarType dtype, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), keys_of(storage.device_type()), c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return tensor;
}

}  // namespace blade

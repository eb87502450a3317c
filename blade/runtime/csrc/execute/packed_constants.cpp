// SPDX-License-Identifier: Apache-2.0
#include "execute/packed_constants.h"


#include <algorithm>
#include <cstring>

#include "engine/checksum.h"
#include "memory/memory.h"

namespace blade {
namespace {

int64_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<int64_t>(tensor._version());
}

// Of 8 bytes in every 16 KiB, of 64 places at least. A write to all of a tensor does not escape it.
uint64_t sum_of_samples(const at::Tensor& tensor) {
  constexpr size_t kFewest = 64, kStep = 16384;
  const auto* bytes = static_cast<const char*>(tensor.storage().data());
  const size_t size = tensor.storage().nbytes(), word = sizeof(uint64_t);
  if (size < word) return 0;
  const size_t places = std::max(std::min(kFewest, size / word), size / kStep);
  const size_t step = size / places / word * word;
  uint64_t sum = 0, sample = 0;
  for (size_t i = 0; i < places; ++i) {
    std::memcpy(&sample, bytes + i * step, word);
    sum = (sum ^ sample) * 0x9E3779B97F4A7C15u + (sum >> 29);
  }
  return sum;
}

void check_constant(const at::Tensor& constant, c10::DeviceType type) {
  if (const auto why = why_not_whole(constant); !why.empty()) {
    throw Unavailable(Code::kCorruptPayload, "A constant of the engine " + why + ".");
  }
  if (constant.is_cpu() || constant.device().type() == type) return;
  throw Unavailable(
      Code::kDeviceMismatch, "The engine was made for " + c10::DeviceTypeName(type, true) + ", but its weights are on " +
                                 constant.device().str() + ": load the file with the map_location it was made with, or optimize again there.");
}

}  // namespace

std::vector<at::Tensor> aliases_of(const std::vector<at::Tensor>& constants, c10::DeviceType type) {
  std::vector<at::Tensor> aliases;
  for (const auto& constant : constants) {
    check_constant(constant, type);
    aliases.push_back(tensor_over(
        constant.storage(), constant.scalar_type(), constant.sizes(), constant.strides(), constant.storage_offset()));
  }
  return aliases;
}

std::vector<at::Tensor> empty_packs(const std::vector<Pack>& packs, c10::DeviceType type) {
  constexpr size_t kAlign = 64;
  if (packs.empty()) return {};
  std::vector<size_t> starts;
  size_t bytes = 0;
  for (const auto& pack : packs) {
    starts.push_back(bytes);
    const size_t own = static_cast<size_t>(pack.numel) * c10::elementSize(pack.dtype);
    bytes += (own + kAlign - 1) / kAlign * kAlign;
  }
  const c10::Storage storage(
      c10::Storage::use_byte_size_t(), bytes, allocate_memory(type, bytes), /*allocator=*/nullptr, /*resizable=*/false);
  std::vector<at::Tensor> tensors;
  for (size_t i = 0; i < packs.size(); ++i) {
    const auto start = static_cast<int64_t>(starts[i] / c10::elementSize(packs[i].dtype));
    const int64_t sizes[] = {packs[i].numel}, strides[] = {1};
    tensors.push_back(tensor_over(storage, packs[i].dtype, sizes, strides, start));
  }
  return tensors;
}

Seen::Seen(const at::Tensor& constant, bool watch)
    : version(version_of(constant)), sum(watch && constant.is_cpu() ? sum_of_samples(constant) : 0) {}

}  // namespace blade

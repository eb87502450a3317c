// SPDX-License-Identifier: Apache-2.0
#include "engine/checksum.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstring>
#include <map>

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace blade {
namespace {

constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87u, kPrime2 = 0xC2B2AE3D27D4EB4Fu, kPrime3 = 0x165667B19E3779F9u,
                   kPrime4 = 0x85EBCA77C2B2AE63u, kPrime5 = 0x27D4EB2F165667C5u;

uint64_t rotate(uint64_t value, int bits) { return (value << bits) | (value >> (64 - bits)); }

template <typename Word>
Word read(const uint8_t* bytes) {
  Word word = 0;
  std::memcpy(&word, bytes, sizeof(word));  // x86-64 and aarch64 are little-endian, as the specification reads
  return word;
}

uint64_t mix_lane(uint64_t lane, uint64_t word) { return rotate(lane + word * kPrime2, 31) * kPrime1; }

uint64_t merge_lane(uint64_t hash, uint64_t lane) { return (hash ^ mix_lane(0, lane)) * kPrime1 + kPrime4; }

uint64_t avalanche(uint64_t hash) {
  hash = (hash ^ (hash >> 33)) * kPrime2;
  hash = (hash ^ (hash >> 29)) * kPrime3;
  return hash ^ (hash >> 32);
}

// Fields one after the other; texts and counts carry their length, so that no two states have the same bytes.
class Fields {
 public:
  void add(uint64_t number) { bytes_.append(reinterpret_cast<const char*>(&number), sizeof(number)); }
  void add(const std::string& text) {
    add(static_cast<uint64_t>(text.size()));
    bytes_ += text;
  }
  void add(at::IntArrayRef numbers) {
    add(static_cast<uint64_t>(numbers.size()));
    for (const int64_t number : numbers) add(static_cast<uint64_t>(number));
  }
  uint64_t hash() const { return xxh64(bytes_.data(), bytes_.size()); }

 private:
  std::string bytes_;
};

// From its first element to its last, whatever lies between.
size_t span_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  return at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
}

uint64_t hash_of(const at::Tensor& tensor) {
  const size_t bytes = span_of(tensor);
  if (bytes == 0 || tensor.is_meta()) return 0;
  if (tensor.is_cpu()) return xxh64(tensor.const_data_ptr(), bytes);
  const int64_t elements[] = {static_cast<int64_t>(bytes / tensor.itemsize())}, dense[] = {1};
  const auto copy = tensor.detach().as_strided(elements, dense).cpu();
  return xxh64(copy.const_data_ptr(), bytes);
}

// What the allocator gave at least; all of them if it is another one's memory.
size_t readable_bytes(const at::Tensor& tensor) {
  const auto& memory = tensor.storage().data_ptr();
  const size_t claimed = tensor.storage().nbytes();
#ifdef __GLIBC__
  const bool is_own = memory.get_deleter() == c10::GetCPUAllocator()->raw_deleter() && memory.get() == memory.get_context();
  if (is_own) return std::min(claimed, malloc_usable_size(memory.get_context()));
#endif
  return memory.get() == nullptr ? 0 : claimed;
}

}  // namespace

uint64_t xxh64(const void* data, size_t size, uint64_t seed) {
  const auto* at = static_cast<const uint8_t*>(data);
  const uint8_t* const end = at + size;
  uint64_t hash = seed + kPrime5;
  if (size >= 32) {
    uint64_t a = seed + kPrime1 + kPrime2, b = seed + kPrime2, c = seed, d = seed - kPrime1;
    for (; end - at >= 32; at += 32) {
      a = mix_lane(a, read<uint64_t>(at));
      b = mix_lane(b, read<uint64_t>(at + 8));
      c = mix_lane(c, read<uint64_t>(at + 16));
      d = mix_lane(d, read<uint64_t>(at + 24));
    }
    hash = rotate(a, 1) + rotate(b, 7) + rotate(c, 12) + rotate(d, 18);
    for (const uint64_t lane : {a, b, c, d}) hash = merge_lane(hash, lane);
  }
  hash += size;
  for (; end - at >= 8; at += 8) hash = rotate(hash ^ mix_lane(0, read<uint64_t>(at)), 27) * kPrime1 + kPrime4;
  for (; end - at >= 4; at += 4) hash = rotate(hash ^ read<uint32_t>(at) * kPrime1, 23) * kPrime2 + kPrime3;
  for (; at < end; ++at) hash = rotate(hash ^ *at * kPrime5, 11) * kPrime1;
  return avalanche(hash);
}

int64_t checksum_of(
    const std::vector<std::string>& words, const c10::Dict<std::string, int64_t>& limits,
    const std::vector<at::Tensor>& tensors) {
  Fields fields;
  fields.add(static_cast<uint64_t>(words.size()));
  for (const auto& word : words) fields.add(word);
  std::map<std::string, int64_t> sorted;
  for (const auto& entry : limits) sorted.emplace(entry.key(), entry.value());
  fields.add(static_cast<uint64_t>(sorted.size()));
  for (const auto& [name, value] : sorted) {
    fields.add(name);
    fields.add(static_cast<uint64_t>(value));
  }
  for (const auto& tensor : tensors) {
    fields.add(static_cast<uint64_t>(tensor.scalar_type()));
    fields.add(tensor.sizes());
    fields.add(tensor.strides());
    fields.add(hash_of(tensor));
  }
  return static_cast<int64_t>(fields.hash());
}

// FNV-1a over 8-byte words, the rest byte by byte, lengths included.
int64_t checksum_of_format_1(const std::string& program, const at::Tensor& object) {
  uint64_t hash = 14695981039346656037u;
  const auto mix = [&hash](uint64_t word) {
    hash = (hash ^ word) * 1099511628211u;
    hash ^= hash >> 29;
  };
  const auto add = [&mix](const void* data, size_t size) {
    mix(size);
    const auto* bytes = static_cast<const uint8_t*>(data);
    size_t i = 0;
    for (; i + sizeof(uint64_t) <= size; i += sizeof(uint64_t)) mix(read<uint64_t>(bytes + i));
    for (; i < size; ++i) mix(bytes[i]);
  };
  add(program.data(), program.size());
  add(object.const_data_ptr(), static_cast<size_t>(object.numel()));
  return static_cast<int64_t>(hash ^ (hash >> 32));
}

std::string why_not_whole(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || !tensor.has_storage()) return "is not a strided tensor";
  const auto is_negative = [](int64_t number) { return number < 0; };
  if (std::any_of(tensor.strides().begin(), tensor.strides().end(), is_negative)) return "has a negative stride";
  if (tensor.storage_offset() < 0) return "begins before its memory";
  if (tensor.is_meta() || tensor.numel() == 0) return "";
  const size_t reach = at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), tensor.itemsize(), static_cast<size_t>(tensor.storage_offset()));
  const size_t there = tensor.is_cpu() ? readable_bytes(tensor) : tensor.storage().nbytes();
  return reach <= there ? "" : "lies outside its memory";
}

}  // namespace blade

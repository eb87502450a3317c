// SPDX-License-Identifier: Apache-2.0
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "execute/execution_plan.h"
#include "memory/memory.h"

namespace blade {
namespace {

constexpr size_t kAlign = 64;

// How many calls pass before memory is given back that none of them needed.
constexpr int kShrinkPeriod = 256;

constexpr size_t kLarge = size_t{64} << 20;

// An arena is one piece, which torch's allocator does not make from the many that it keeps: where those are as much, they
// go back to the device first. That is rare: an arena moves when it has to grow, and when long nobody needed half of it.
void make_room(c10::DeviceType type, size_t bytes) {
  if (type == at::kCPU || bytes < kLarge) return;
  auto* allocator = c10::getDeviceAllocator(type);
  const auto stats = allocator->getDeviceStats(c10::impl::VirtualGuardImpl(type).getDevice().index());
  const auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto kept = stats.reserved_bytes[all].current - stats.allocated_bytes[all].current;
  if (kept >= static_cast<int64_t>(bytes / 2)) allocator->emptyCache();
}

}  // namespace

Arena::Arena(c10::DeviceType type) : type_(type) { allocate(kAlign); }

// What there was is freed first: the two together may be more than there is.
void Arena::allocate(size_t bytes) {
  if (storage_) {
    storage_.set_data_ptr_noswap(c10::DataPtr(nullptr, storage_.device()));
    storage_.unsafeGetStorageImpl()->unsafe_set_nbytes(0);
    data_ = nullptr;
    capacity_ = 0;
  }
  make_room(type_, bytes);
  auto memory = allocate_memory(type_, bytes);
  data_ = static_cast<char*>(memory.get());
  capacity_ = bytes;
  ++moves_;
  if (!storage_) {
    // not resizable: an op that tried to resize a tensor of the arena must raise instead
    storage_ = c10::Storage(
        c10::Storage::use_byte_size_t(), bytes, std::move(memory), /*allocator=*/nullptr, /*resizable=*/false);
    return;
  }
  storage_.set_data_ptr_noswap(std::move(memory));
  storage_.unsafeGetStorageImpl()->unsafe_set_nbytes(bytes);
}

void Arena::reserve(size_t bytes) {
  if (bytes <= capacity_) return;
  // every move of an accelerator's memory costs the graphs that know its address
  allocate(type_ == at::kCPU ? bytes : std::max(bytes, capacity_ / 4 * 5));
}

void Arena::shrink(size_t bytes) {
  if (bytes < capacity_) allocate(std::max(bytes, kAlign));
}

void ShrinkingArena::reserve(size_t bytes) {
  arena_.reserve(bytes);
  peak_ = std::max(peak_, bytes);
  if (++calls_ < kShrinkPeriod) return;
  if (peak_ < arena_.capacity() / 2) arena_.shrink(peak_);
  calls_ = 0;
  peak_ = bytes;
}

ShrinkingArena& Arenas::of_stage(size_t stage) {
  while (stages_.size() <= stage) stages_.push_back(std::make_unique<ShrinkingArena>(type_));
  return *stages_[stage];
}

bool Arenas::contain(const c10::StorageImpl* storage) const {
  const auto is_it = [storage](const ShrinkingArena& one) { return one.arena().storage().unsafeGetStorageImpl() == storage; };
  return is_it(first_) || std::any_of(stages_.begin(), stages_.end(), [&](const auto& one) { return is_it(*one); });
}

size_t Arenas::bytes() const {
  size_t total = first_.arena().capacity();
  for (const auto& one : stages_) total += one->arena().capacity();
  return total;
}

size_t plan_memory(std::vector<Buffer>& buffers) {
  std::vector<size_t> order(buffers.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return buffers[a].bytes > buffers[b].bytes; });
  std::vector<size_t> placed;  // sorted by offset
  size_t total = 0;
  for (const size_t id : order) {
    Buffer& buffer = buffers[id];
    if (buffer.first < 0 || buffer.bytes == 0) continue;
    buffer.bytes = (buffer.bytes + kAlign - 1) / kAlign * kAlign;
    size_t best = 0, best_gap = std::numeric_limits<size_t>::max(), end = 0;
    for (const size_t other_id : placed) {
      const Buffer& other = buffers[other_id];
      if (other.last < buffer.first || buffer.last < other.first) continue;
      if (other.offset >= end + buffer.bytes && other.offset - end < best_gap) {
        best = end;
        best_gap = other.offset - end;
      }
      end = std::max(end, other.offset + other.bytes);
    }
    buffer.offset = best_gap == std::numeric_limits<size_t>::max() ? end : best;
    total = std::max(total, buffer.offset + buffer.bytes);
    const auto by_offset = [&](size_t a, size_t b) { return buffers[a].offset < buffers[b].offset; };
    placed.insert(std::upper_bound(placed.begin(), placed.end(), id, by_offset), id);
  }
  return total;
}

}  // namespace blade

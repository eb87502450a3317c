// SPDX-License-Identifier: Apache-2.0
#include "execute/packed_constants.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "engine/checksum.h"
#include "memory/memory.h"

namespace blade {

// Whether two tensors count their versions together, as a view and its base do, torch tells nobody. An explicit
// instantiation may name the private member that says so.
const void* counter_of(const c10::VariableVersion& version);
template <auto Member>
struct CounterAccess {
  friend const void* counter_of(const c10::VariableVersion& version) { return (version.*Member).get(); }
};
template struct CounterAccess<&c10::VariableVersion::version_counter_>;

namespace {

bool count_together(const at::Tensor& one, const at::Tensor& other) {
  const auto *a = one.unsafeGetTensorImpl(), *b = other.unsafeGetTensorImpl();
  if (a == b) return true;
  const void* counter = counter_of(a->version_counter());  // null: of an inference tensor
  return counter != nullptr && counter == counter_of(b->version_counter());
}

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

// Names of kernels end with a digest of their code: equal names compute the same. Those of old files do not.
bool is_named_by_content(const std::string& kernel) {
  constexpr size_t kDigits = 12;
  if (kernel.size() <= kDigits || kernel[kernel.size() - kDigits - 1] != '_') return false;
  return std::all_of(kernel.end() - kDigits, kernel.end(), [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

template <typename T>
void append(std::string& key, const T& value) {
  key.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

// What packs are equal by: the kernel, what it reads, and how. Memory stays where it is while a pack made of it lives.
std::string key_of(const Pack& pack, const std::vector<at::Tensor>& aliases, c10::Device device, bool watch) {
  std::string key = pack.kernel;
  key += '\0';
  append(key, pack.dtype);
  append(key, pack.numel);
  append(key, watch);
  append(key, device.type());
  append(key, device.index());
  for (const auto& fill : pack.fills) {
    const auto& alias = aliases[fill.constant];
    append(key, alias.const_data_ptr());
    append(key, alias.scalar_type());
    append(key, alias.nbytes());
    append(key, fill.extent);
    append(key, fill.ints.size());
    for (const int64_t value : fill.ints) append(key, value);
  }
  return key;
}

// Those in use. An entry outlives what it knew until its key or a sweep comes by.
class KnownPacks {
 public:
  std::shared_ptr<PackedConstant> find(const std::string& key) const {
    const auto found = known_.find(key);
    return found == known_.end() ? nullptr : found->second.lock();
  }

  void add(const std::string& key, const std::shared_ptr<PackedConstant>& constant) {
    if (known_.size() >= sweep_at_) {
      for (auto it = known_.begin(); it != known_.end();) it = it->second.expired() ? known_.erase(it) : std::next(it);
      sweep_at_ = std::max<size_t>(kFirstSweep, 2 * known_.size());
    }
    known_[key] = constant;
  }

 private:
  static constexpr size_t kFirstSweep = 1024;
  std::unordered_map<std::string, std::weak_ptr<PackedConstant>> known_;
  size_t sweep_at_ = kFirstSweep;
};

KnownPacks& known_packs() {
  static auto* instance = new KnownPacks();  // engines may outlive static objects
  return *instance;
}

// One tensor per pack, side by side in one allocation: large ones lie in huge pages.
std::vector<at::Tensor> empty_packs(const std::vector<const Pack*>& packs, c10::DeviceType type) {
  constexpr size_t kAlign = 64;
  if (packs.empty()) return {};
  std::vector<size_t> starts;
  size_t bytes = 0;
  for (const auto* pack : packs) {
    starts.push_back(bytes);
    const size_t own = static_cast<size_t>(pack->numel) * c10::elementSize(pack->dtype);
    bytes += (own + kAlign - 1) / kAlign * kAlign;
  }
  const c10::Storage storage(
      c10::Storage::use_byte_size_t(), bytes, allocate_memory(type, bytes), /*allocator=*/nullptr, /*resizable=*/false);
  std::vector<at::Tensor> tensors;
  for (size_t i = 0; i < packs.size(); ++i) {
    const auto start = static_cast<int64_t>(starts[i] / c10::elementSize(packs[i]->dtype));
    const int64_t sizes[] = {packs[i]->numel}, strides[] = {1};
    tensors.push_back(tensor_over(storage, packs[i]->dtype, sizes, strides, start));
  }
  return tensors;
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

Seen::Seen(const at::Tensor& constant, bool watch)
    : version(version_of(constant)), sum(watch && constant.is_cpu() ? sum_of_samples(constant) : 0) {}

PackedConstant::PackedConstant(const Pack& pack, at::Tensor packed, std::vector<Source> sources, bool watch)
    : tensor_(std::move(packed)), sources_(std::move(sources)), watch_(watch), states_(pack.fills.size()) {}

bool PackedConstant::is_fresh() const {
  if (!has_contents()) return false;
  for (size_t k = 0; k < states_.size(); ++k) {
    const Seen now(sources_[k].given, watch_);
    if (states_[k].version.load(std::memory_order_acquire) != now.version) return false;
    if (states_[k].sum.load(std::memory_order_acquire) != now.sum) return false;
  }
  return true;
}

std::vector<Seen> PackedConstant::look() const {
  std::vector<Seen> seen;
  seen.reserve(sources_.size());
  for (const auto& source : sources_) seen.emplace_back(source.given, watch_);
  return seen;
}

void PackedConstant::set_packed(const std::vector<Seen>& seen) {
  for (size_t k = 0; k < states_.size(); ++k) {
    states_[k].version.store(seen[k].version, std::memory_order_release);
    states_[k].sum.store(seen[k].sum, std::memory_order_release);
  }
  has_contents_.store(true, std::memory_order_release);
}

// Writes to one of them show in the version of the other. In a file that was loaded, each has a version of its own: they
// count as the same where elements are looked at anyway.
bool PackedConstant::has_sources(const std::vector<Source>& sources) const {
  for (size_t k = 0; k < sources.size(); ++k) {
    if (count_together(sources_[k].given, sources[k].given)) continue;
    if (watch_ && Seen(sources_[k].given, true) == Seen(sources[k].given, true)) continue;
    return false;
  }
  return true;
}

std::mutex& packing_mutex() {
  static auto* instance = new std::mutex();
  return *instance;
}

std::vector<std::shared_ptr<PackedConstant>> packed_constants(
    const std::vector<Pack>& packs, const std::vector<at::Tensor>& given, const std::vector<at::Tensor>& aliases,
    c10::Device device, bool watch) {
  std::vector<std::shared_ptr<PackedConstant>> found(packs.size());
  std::vector<std::vector<PackedConstant::Source>> sources(packs.size());
  std::vector<std::string> keys(packs.size());  // "": not to be shared
  std::vector<const Pack*> missing;
  for (size_t i = 0; i < packs.size(); ++i) {
    for (const auto& fill : packs[i].fills) sources[i].push_back({given[fill.constant], aliases[fill.constant]});
    if (is_named_by_content(packs[i].kernel)) keys[i] = key_of(packs[i], aliases, device, watch);
    if (!keys[i].empty()) found[i] = known_packs().find(keys[i]);
    if (found[i] && !found[i]->has_sources(sources[i])) found[i] = nullptr;
    if (!found[i]) missing.push_back(&packs[i]);
  }
  const auto tensors = empty_packs(missing, device.type());
  for (size_t i = 0, next = 0; i < packs.size(); ++i) {
    if (found[i]) continue;
    found[i] = std::make_shared<PackedConstant>(packs[i], tensors[next++], std::move(sources[i]), watch);
    if (!keys[i].empty()) known_packs().add(keys[i], found[i]);
  }
  return found;
}

}  // namespace blade

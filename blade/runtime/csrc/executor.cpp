// SPDX-License-Identifier: Apache-2.0
#include "executor.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "cpu.h"
#include "pages.h"
#include "updates.h"

namespace blade {

using Key = c10::SmallVector<int64_t, 24>;  // the sizes of all inputs

struct KeyHash {
  size_t operator()(const Key& sizes) const {
    uint64_t hash = 14695981039346656037ull;
    for (const int64_t size : sizes) hash = (hash ^ static_cast<uint64_t>(size)) * 1099511628211ull;
    return static_cast<size_t>(hash ^ (hash >> 32));
  }
};

namespace {

// How many calls pass before a lane gives back memory that none of them needed.
constexpr int kShrinkPeriod = 256;

Key key_of(const std::vector<at::Tensor>& inputs) {
  Key key;
  for (const auto& input : inputs) key.append(input.sizes().begin(), input.sizes().end());
  return key;
}

// An alias keeps pointing at these weights whatever the user does to the module's attributes
// (`.data = ...` in `module.half()` swaps what a tensor holds).
std::vector<at::Tensor> aliases_of(const std::vector<at::Tensor>& constants) {
  std::vector<at::Tensor> aliases;
  for (const auto& constant : constants) {
    TORCH_CHECK(constant.defined() && constant.is_cpu() && constant.layout() == at::kStrided,
                "blade: a constant is not a strided CPU tensor");
    auto alias = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(constant.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU), constant.dtype());
    alias.unsafeGetTensorImpl()->set_sizes_and_strides(
        constant.sizes(), constant.strides(), constant.storage_offset());
    aliases.push_back(std::move(alias));
  }
  return aliases;
}

// One tensor per pack, side by side in one allocation.
std::vector<at::Tensor> empty_packs(const std::vector<Pack>& packs) {
  constexpr size_t kAlign = 64;
  std::vector<size_t> starts;
  size_t bytes = 0;
  for (const auto& pack : packs) {
    starts.push_back(bytes);
    const size_t own = static_cast<size_t>(pack.numel) * c10::elementSize(pack.dtype);
    bytes += (own + kAlign - 1) / kAlign * kAlign;
  }
  const c10::Storage storage(
      c10::Storage::use_byte_size_t(), bytes, allocate_pages(bytes), /*allocator=*/nullptr, /*resizable=*/false);
  std::vector<at::Tensor> tensors;
  for (size_t i = 0; i < packs.size(); ++i) {
    auto tensor = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), c10::scalarTypeToTypeMeta(packs[i].dtype));
    const auto start = static_cast<int64_t>(starts[i] / c10::elementSize(packs[i].dtype));
    const c10::SmallVector<int64_t, 1> sizes{packs[i].numel}, strides{1};
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, start);
    tensors.push_back(std::move(tensor));
  }
  return tensors;
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

void check_cpu(const Program& program) {
  for (const auto& feature : program.isa) {
    if (cpu_features().count(feature) == 0) {
      throw Unavailable(
          Code::kCpuMismatch, "The engine's native code needs the CPU feature '" + feature + "', which this CPU lacks.");
    }
  }
  for (const auto& input : program.inputs) {
    if (input.device != at::kCPU) {
      throw Unavailable(Code::kBackendUnavailable, "This runtime executes DISC programs on CPU only.");
    }
  }
}

// Engine code runs as an op would run below autograd, and its results are ordinary tensors even
// when the caller is in inference mode (prebuilt tensors must serve both kinds of callers).
struct BelowAutograd {
  c10::InferenceMode ordinary_tensors{false};
  c10::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

}  // namespace

class Executor::Lane {
 public:
  Frame& frame_for(const Loaded& loaded, const std::vector<at::Tensor>& inputs, size_t max_shapes) {
    Key key = key_of(inputs);
    if (!frames_.empty() && frames_.front().first == key) return *frames_.front().second;
    const auto found = index_.find(key);
    if (found != index_.end()) {
      frames_.splice(frames_.begin(), frames_, found->second);
      return *frames_.front().second;
    }
    auto frame = std::make_unique<Frame>(loaded, inputs, arena_);
    if (frames_.size() >= max_shapes) {
      index_.erase(frames_.back().first);
      frames_.pop_back();
    }
    frames_.emplace_front(key, std::move(frame));
    index_.emplace(std::move(key), frames_.begin());
    return *frames_.front().second;
  }

  // Drops the frame used last.
  void drop_front() {
    if (frames_.empty()) return;
    index_.erase(frames_.front().first);
    frames_.pop_front();
  }

  void reserve(size_t bytes) {
    arena_.reserve(bytes);
    peak_ = std::max(peak_, bytes);
    if (++calls_ < kShrinkPeriod) return;
    if (peak_ < arena_.capacity() / 2) arena_.shrink(peak_);
    calls_ = 0;
    peak_ = bytes;
  }

  size_t bytes() const { return arena_.capacity(); }

 private:
  using Entry = std::pair<Key, std::unique_ptr<Frame>>;
  Arena arena_;
  std::list<Entry> frames_;  // most recently used first
  std::unordered_map<Key, std::list<Entry>::iterator, KeyHash> index_;
  size_t peak_ = 0;
  int calls_ = 0;
};

Executor::Executor(
    Program program, const at::Tensor& object, const std::vector<at::Tensor>& constants, ExecutorLimits limits)
    : limits_(limits) {
  check_cpu(program);
  loaded_.program = std::move(program);
  loaded_.constants = aliases_of(constants);
  if (object.numel() > 0) {
    loaded_.library = std::make_unique<Library>(static_cast<const uint8_t*>(object.const_data_ptr()), object.numel());
  }
  for (const auto& instr : loaded_.program.instrs) {
    if (!instr.op && !loaded_.library) {
      throw Unavailable(Code::kCorruptPayload, "The engine's program has kernels but no native code.");
    }
    loaded_.kernels.push_back(instr.op ? nullptr : loaded_.library->find(instr.kernel));
  }
  num_given_ = constants.size();
  for (const auto& pack : loaded_.program.packs) {
    if (!loaded_.library) throw Unavailable(Code::kCorruptPayload, "The engine packs constants but has no native code.");
    pack_kernels_.push_back(loaded_.library->find(pack.kernel));
    for (const auto& fill : pack.fills) {
      packed_from_.push_back(look_at(fill.constant, constants[fill.constant]));
    }
  }
  for (auto& packed : empty_packs(loaded_.program.packs)) loaded_.constants.push_back(std::move(packed));
  pack_constants();
}

void Executor::pack_constants() {
  for (size_t i = 0; i < pack_kernels_.size(); ++i) {
    const auto& pack = loaded_.program.packs[i];
    auto& packed = loaded_.constants[num_given_ + i];
    std::memset(packed.mutable_data_ptr(), 0, packed.nbytes());
    for (const auto& fill : pack.fills) {
      auto* source = const_cast<void*>(loaded_.constants[fill.constant].const_data_ptr());
      void* ptrs[] = {source, packed.mutable_data_ptr(), nullptr};
      at::parallel_for(0, fill.extent, 1, [&](int64_t begin, int64_t end) {
        pack_kernels_[i](ptrs, fill.ints.data(), begin, end);
      });
    }
  }
}

Executor::PackedFrom Executor::look_at(int64_t constant, const at::Tensor& given) const {
  return {constant, version_of(given), limits_.watch_constants ? sum_of_samples(given) : 0};
}

void Executor::refresh_packs(const std::vector<at::Tensor>& constants) {
  const auto stale = [&](const PackedFrom& from) {
    const auto& given = constants[from.constant];
    return version_of(given) != from.version || (limits_.watch_constants && sum_of_samples(given) != from.sum);
  };
  if (std::none_of(packed_from_.begin(), packed_from_.end(), stale)) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto& from : packed_from_) from = look_at(from.constant, constants[from.constant]);
  pack_constants();
}

Executor::~Executor() = default;

std::unique_ptr<Executor::Lane> Executor::take_lane() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!idle_.empty()) {
      auto lane = std::move(idle_.back());
      idle_.pop_back();
      idle_bytes_ -= lane->bytes();
      return lane;
    }
  }
  return std::make_unique<Lane>();
}

void Executor::give_lane(std::unique_ptr<Lane> lane) {
  static const size_t max_idle = std::max<size_t>(8, 2 * std::thread::hardware_concurrency());
  const std::lock_guard<std::mutex> lock(mutex_);
  const bool room = idle_.size() < max_idle && idle_bytes_ + lane->bytes() <= limits_.max_idle_bytes;
  if (!idle_.empty() && !room) return;
  idle_bytes_ += lane->bytes();
  idle_.push_back(std::move(lane));
}

void Executor::forget_sizes() {
  const std::lock_guard<std::mutex> lock(mutex_);
  idle_.clear();
  idle_bytes_ = 0;
}

std::optional<std::vector<at::Tensor>> Executor::run_in_lane(
    const std::vector<at::Tensor>& inputs, std::vector<double>* seconds) {
  const auto& program = loaded_.program;
  if (!may_update(program, inputs, loaded_.constants)) return std::nullopt;
  const BelowAutograd guards;
  std::vector<at::Tensor> copies;  // filled at the first input that is not contiguous
  for (size_t i = 0; i < inputs.size(); ++i) {
    const auto& input = inputs[i];
    if (input.is_contiguous() && !input.is_conj() && !input.is_neg()) continue;
    if (program.aliased[i]) return std::nullopt;
    if (copies.empty()) copies = inputs;
    copies[i] = input.resolve_conj().resolve_neg().contiguous();
  }
  const auto& ready = copies.empty() ? inputs : copies;
  auto lane = take_lane();
  Frame& frame = lane->frame_for(loaded_, ready, limits_.max_shapes);
  if (frame.failed() != nullptr) {
    give_lane(std::move(lane));
    return std::nullopt;
  }
  std::vector<at::Tensor> outputs;
  try {
    lane->reserve(frame.arena_bytes());
    outputs = frame.run(ready, seconds);
  } catch (...) {
    lane->drop_front();
    give_lane(std::move(lane));
    throw;
  }
  give_lane(std::move(lane));
  finish_updates(program, inputs, ready);
  for (size_t k = 0; k < outputs.size(); ++k) {  // an input given back is the caller's own tensor
    const auto& slot = program.slots[program.outputs[k]];
    if (slot.kind == SlotKind::kInput) outputs[k] = inputs[slot.index];
  }
  return outputs;
}

std::optional<std::vector<at::Tensor>> Executor::run(const std::vector<at::Tensor>& inputs) {
  return run_in_lane(inputs, nullptr);
}

std::vector<double> Executor::profile(const std::vector<at::Tensor>& inputs, int64_t repeats) {
  std::vector<double> seconds(loaded_.program.instrs.size(), 0.0);
  run(inputs);  // the first call of a shape prepares it
  for (int64_t i = 0; i < repeats; ++i) {
    TORCH_CHECK(run_in_lane(inputs, &seconds), "blade: the engine's guards do not hold for these inputs");
  }
  for (double& s : seconds) s /= static_cast<double>(std::max<int64_t>(repeats, 1));
  return seconds;
}

}  // namespace blade

// SPDX-License-Identifier: Apache-2.0
// The tensors an engine shares with the module it is part of, and what it computes from them once.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "program/program.h"

namespace blade {

// An alias keeps pointing at these weights whatever the user does to the module's attributes
// (`.data = ...` in `module.half()` swaps what a tensor holds). Throws Unavailable for a constant that
// no program can read: not strided, on another kind of device than `type` or the CPU.
std::vector<at::Tensor> aliases_of(const std::vector<at::Tensor>& constants, c10::DeviceType type);

// How a constant was when it was packed. Its version does not tell of all writes: if `watch`, some
// of its elements are compared, too (on the CPU only).
struct Seen {
  Seen(const at::Tensor& constant, bool watch);
  bool operator==(const Seen& other) const { return version == other.version && sum == other.sum; }
  int64_t version;
  uint64_t sum;
};

// What one pack computes, for all engines of the process that compute it from the same constants: the paths of a model
// hold its weights once more, not once more each. It lives as long as one of them.
class PackedConstant {
 public:
  struct Source {
    at::Tensor given;  // the module's attribute, whose version tells of writes
    at::Tensor alias;  // the same memory, which the kernel reads
  };

  // `packed` has room for what `pack` computes.
  PackedConstant(const Pack& pack, at::Tensor packed, std::vector<Source> sources, bool watch);

  const at::Tensor& tensor() const { return tensor_; }
  const std::vector<Source>& sources() const { return sources_; }

  // Whether `tensor` holds what the pack computes of its sources as they are now. Takes no lock: who sees a source as
  // it was set sees what was packed, too.
  bool is_fresh() const;

  // Before it is packed: who writes to a source meanwhile is seen at the next look.
  std::vector<Seen> look() const;
  void set_packed(const std::vector<Seen>& seen);

  // Whether it was packed at least once: others may read it.
  bool has_contents() const { return has_contents_.load(std::memory_order_acquire); }

  // Whether an engine with these sources may use it.
  bool has_sources(const std::vector<Source>& sources) const;

 private:
  struct State {
    std::atomic<int64_t> version{0};
    std::atomic<uint64_t> sum{0};
  };

  const at::Tensor tensor_;
  const std::vector<Source> sources_;
  const bool watch_;
  std::vector<State> states_;
  std::atomic<bool> has_contents_{false};
};

// Held while constants are packed, by whichever engine.
std::mutex& packing_mutex();

// One per pack of a program, on the current device: those that other engines have, and new ones, side by side in one
// allocation and not initialized. `given`: the module's attributes. The packing mutex is held.
std::vector<std::shared_ptr<PackedConstant>> packed_constants(
    const std::vector<Pack>& packs, const std::vector<at::Tensor>& given, const std::vector<at::Tensor>& aliases,
    c10::Device device, bool watch);

}  // namespace blade

// SPDX-License-Identifier: Apache-2.0
// The tensors an engine shares with the module it is part of, and what it computes from them once.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "program/program.h"

namespace blade {

// An alias keeps pointing at these weights whatever the user does to the module's attributes
// (`.data = ...` in `module.half()` swaps what a tensor holds). Throws Unavailable for a constant that
// no program can read: not strided, on another kind of device than `type` or the CPU.
std::vector<at::Tensor> aliases_of(const std::vector<at::Tensor>& constants, c10::DeviceType type);

// One tensor per pack, side by side in one allocation, on the current device. Not initialized.
std::vector<at::Tensor> empty_packs(const std::vector<Pack>& packs, c10::DeviceType type);

// How a constant was when it was packed. Its version does not tell of all writes: if `watch`, some
// of its elements are compared, too (on the CPU only).
struct Seen {
  Seen(const at::Tensor& constant, bool watch);
  bool operator==(const Seen& other) const { return version == other.version && sum == other.sum; }
  int64_t version;
  uint64_t sum;
};

}  // namespace blade

// SPDX-License-Identifier: Apache-2.0
// The device a program was compiled for: the CPU, or an accelerator and its code on each device.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device/accelerator.h"
#include "execute/execution_plan.h"
#include "program/program.h"

namespace blade {

// Throws Unavailable where this CPU lacks a feature that the program's isa names.
void check_cpu(const Program& program);

// The accelerator of `isa NAME ...`, or nullptr for a program of the CPU. Throws Unavailable where it is not there,
// where the CPU lacks a feature, and where the program's inputs or instructions are not this device's.
Accelerator* find_target(const Program& program);

// The device code of an engine, loaded on the devices where it is called.
class DeviceCode {
 public:
  // Throws Unavailable: damaged, or a kernel that no architecture has.
  DeviceCode(const Program& program, Accelerator& accelerator, const at::Tensor& object);

  struct Kernels {
    std::vector<const Kernel*> launches, packs;  // per instruction and per pack
    std::vector<std::unique_ptr<Kernel>> owned;
  };

  // On the current device, `device`. Throws Unavailable if the object has no code for it.
  const Kernels& on(c10::DeviceIndex device);

 private:
  std::unique_ptr<Kernels> load(c10::DeviceIndex device) const;
  std::string architecture_for(c10::DeviceIndex device) const;

  const Program& program_;
  Accelerator& accelerator_;
  const at::Tensor object_;  // the binaries point into it
  std::vector<Binary> binaries_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Kernels>> loaded_;  // by device
};

}  // namespace blade

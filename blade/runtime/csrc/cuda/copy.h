// SPDX-License-Identifier: Apache-2.0
// Several copies within a device's memory in one launch.
#pragma once

#include <cuda.h>

#include <optional>
#include <vector>

#include "device/accelerator.h"

namespace blade::cuda {

// A launch of the kernel that copies, for some of a list of copies.
class CopyLaunch {
 public:
  CopyLaunch(CUfunction kernel, size_t capacity, size_t first, const std::vector<Copy>& copies);

  // The addresses of these copies, which are as many and as large as the first ones. False: they are the same.
  bool set(const std::vector<Copy>& copies);

  void launch(CUstream stream);
  void set_node(CUgraphExec exec, CUgraphNode of);

  CUDA_KERNEL_NODE_PARAMS_v3 node();  // points into this

 private:
  Grid grid() const { return {blocks_, static_cast<uint32_t>(count_), 1}; }

  CUfunction kernel_;
  size_t first_, count_;
  unsigned blocks_ = 1;
  std::vector<Copy> table_;  // the kernel's parameter: as many entries as it is declared with
  void* params_[1] = {};
};

// The launches for these copies on the current device; nullopt if the driver could not compile the kernel.
std::optional<std::vector<CopyLaunch>> launches_of(const std::vector<Copy>& copies);

// Accelerator::copy.
void copy_all(const std::vector<Copy>& copies, CUstream stream);

}  // namespace blade::cuda

// SPDX-License-Identifier: Apache-2.0
// A function of an engine's object, loaded on one device.
#pragma once

#include <cuda.h>

#include <string>

#include "device/accelerator.h"

namespace blade::cuda {

class CudaKernel final : public Kernel {
 public:
  explicit CudaKernel(const Binary& binary);  // on the current device
  ~CudaKernel() override;
  CudaKernel(const CudaKernel&) = delete;
  CudaKernel& operator=(const CudaKernel&) = delete;

  void launch(const Grid& grid, void** params, Stream stream) const override;

  // The same as a node of a graph, and whether it may start before what precedes it ends.
  CUDA_KERNEL_NODE_PARAMS_v3 node(const Grid& grid, void** params) const;
  bool is_early() const { return early_; }

 private:
  const std::string name_;
  const uint32_t threads_, shared_;
  const bool early_;
  CUcontext context_ = nullptr;
  CUmodule module_ = nullptr;
  CUfunction function_ = nullptr;
};

}  // namespace blade::cuda

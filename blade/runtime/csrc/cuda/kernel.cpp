// SPDX-License-Identifier: Apache-2.0
#include "kernel.h"

#include <c10/macros/Macros.h>

#include "driver.h"
#include "node.h"
#include "relaxed.h"

namespace blade::cuda {
namespace {

constexpr uint32_t kSharedWithoutAsking = 48 << 10;  // bytes a block may have unless its function says more

}  // namespace

CudaKernel::CudaKernel(const Binary& binary)
    : name_(binary.name), threads_(binary.threads), shared_(binary.shared), early_(binary.early) {
  const auto& cu = driver();
  const Relaxed relaxed;
  check(cu.cuCtxGetCurrent(&context_), "asking for the context");
  check(cu.cuModuleLoadData(&module_, std::string(binary.bytes, binary.bytes + binary.size).data()), "loading a kernel");
  try {
    check(cu.cuModuleGetFunction(&function_, module_, name_.c_str()), "finding a kernel");
    if (shared_ > kSharedWithoutAsking) {
      check(
          cu.cuFuncSetAttribute(function_, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, static_cast<int>(shared_)),
          "reserving shared memory");
    }
  } catch (...) {
    cu.cuModuleUnload(module_);
    throw;
  }
}

// It may still run. Where that cannot be waited for (somebody is capturing, an error was hit) it stays loaded.
CudaKernel::~CudaKernel() {
  const auto& cu = driver();
  if (!is_alive() || cu.cuCtxPushCurrent(context_) != CUDA_SUCCESS) return;
  {
    const Relaxed relaxed;
    if (cu.cuCtxSynchronize() == CUDA_SUCCESS) cu.cuModuleUnload(module_);
  }
  cu.cuCtxPopCurrent(&context_);
}

void CudaKernel::launch(const Grid& grid, void** params, Stream stream) const {
  CUlaunchAttribute early{};
  early.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  early.value.programmaticStreamSerializationAllowed = 1;
  CUlaunchConfig config{};
  config.gridDimX = grid.x;
  config.gridDimY = grid.y;
  config.gridDimZ = grid.z;
  config.blockDimX = threads_;
  config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = shared_;
  config.hStream = static_cast<CUstream>(stream);
  config.attrs = &early;
  config.numAttrs = early_ ? 1 : 0;
  const auto result = driver().cuLaunchKernelEx(&config, function_, params, nullptr);
  if (C10_UNLIKELY(result != CUDA_SUCCESS)) check(result, ("launching " + name_).c_str());
}

CUDA_KERNEL_NODE_PARAMS_v3 CudaKernel::node(const Grid& grid, void** params) const {
  return node_of<CUDA_KERNEL_NODE_PARAMS_v3>(function_, grid, threads_, shared_, params);
}

}  // namespace blade::cuda

// SPDX-License-Identifier: Apache-2.0
// The CUDA driver, found at run time: this library must load where there is none.
#pragma once

#include <cuda.h>

#include <string>

namespace blade::cuda {

#define BLADE_CUDA_FUNCTIONS(X)                                                                                   \
  X(cuInit) X(cuGetErrorName) X(cuGetErrorString) X(cuCtxGetCurrent) X(cuCtxSetCurrent) X(cuCtxPushCurrent)       \
  X(cuCtxPopCurrent) X(cuCtxSynchronize) X(cuDevicePrimaryCtxRetain) X(cuDeviceGet) X(cuDeviceGetAttribute)       \
  X(cuModuleLoadData) X(cuModuleUnload) X(cuModuleGetFunction) X(cuFuncSetAttribute) X(cuLaunchKernelEx)          \
  X(cuStreamCreate) X(cuStreamSynchronize) X(cuStreamWaitEvent) X(cuStreamIsCapturing) X(cuStreamBeginCapture)    \
  X(cuStreamEndCapture) X(cuThreadExchangeStreamCaptureMode) X(cuGraphInstantiate) X(cuGraphLaunch)               \
  X(cuGraphDestroy) X(cuGraphExecDestroy) X(cuEventCreate) X(cuEventRecord) X(cuEventDestroy)                     \
  X(cuEventSynchronize) X(cuEventElapsedTime) X(cuMemcpyDtoDAsync) X(cuMemsetD8Async) X(cuStreamGetCaptureInfo)      \
  X(cuGraphExecKernelNodeSetParams) X(cuGraphKernelNodeGetParams) X(cuGraphCreate)

// Null where the driver is older.
#define BLADE_NEWER_CUDA_FUNCTIONS(X) X(cuGraphAddNode_v2)

// The functions by their own names, in the versions of the headers this was compiled with.
struct Driver {
#define BLADE_DECLARE(name) decltype(&::name) name = nullptr;
  BLADE_CUDA_FUNCTIONS(BLADE_DECLARE)
  BLADE_NEWER_CUDA_FUNCTIONS(BLADE_DECLARE)
#undef BLADE_DECLARE
};

// Empty, or why there is no driver to use.
const std::string& why_no_driver();

// Only where there is one.
const Driver& driver();

// False when the process ends (the driver may be gone before what it made is) and in a forked child, where it does
// not work: what is destroyed then is left as it is.
bool is_alive();

// Throws c10::Error with the driver's own text.
void check(CUresult result, const char* what);

}  // namespace blade::cuda

// SPDX-License-Identifier: Apache-2.0
// CUDA graphs of what an engine, and ops of torch that it calls, enqueue.
#pragma once

#include "device/accelerator.h"

namespace blade::cuda {

// Accelerator::record.
std::unique_ptr<Graph> capture(
    c10::DeviceIndex device, Stream stream, bool draws, const std::function<void(Recorder&)>& work);

}  // namespace blade::cuda

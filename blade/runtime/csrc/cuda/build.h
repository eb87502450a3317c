// SPDX-License-Identifier: Apache-2.0
// Graphs put together node by node: nothing is captured, so what other threads do meanwhile (wait for the device, use
// the default stream) neither fails nor makes the graph fail.
#pragma once

#include "device/accelerator.h"

namespace blade::cuda {

// Whether the driver can: from CUDA 12.3 on.
bool can_build();

// Accelerator::record, where the recorder is told all that is to be done.
std::unique_ptr<Graph> build(Stream stream, const std::function<void(Recorder&)>& work);

}  // namespace blade::cuda

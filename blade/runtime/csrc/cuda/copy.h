// SPDX-License-Identifier: Apache-2.0
// Several copies within a device's memory in one launch.
#pragma once

#include <cuda.h>

#include <vector>

#include "accelerator.h"

namespace blade::cuda {

// Accelerator::copy.
void copy_all(const std::vector<Copy>& copies, CUstream stream);

}  // namespace blade::cuda

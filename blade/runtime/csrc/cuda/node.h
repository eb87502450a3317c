// SPDX-License-Identifier: Apache-2.0
// A launch as a node of a graph.
#pragma once

#include <cuda.h>

#include "device/accelerator.h"

namespace blade::cuda {

// `P`: the version of the parameters that a function of the driver takes. `params` has the address of every argument.
template <typename P>
P node_of(CUfunction function, const Grid& grid, unsigned threads, unsigned shared, void** params) {
  P node{};
  node.func = function;
  node.gridDimX = grid.x;
  node.gridDimY = grid.y;
  node.gridDimZ = grid.z;
  node.blockDimX = threads;
  node.blockDimY = node.blockDimZ = 1;
  node.sharedMemBytes = shared;
  node.kernelParams = params;
  return node;
}

}  // namespace blade::cuda

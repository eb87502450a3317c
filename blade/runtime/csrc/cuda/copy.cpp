// SPDX-License-Identifier: Apache-2.0
#include "copy.h"

#include "driver.h"

namespace blade::cuda {

void copy_all(const std::vector<Copy>& copies, CUstream stream) {
  for (const auto& one : copies) {
    if (one.bytes == 0) continue;
    const auto to = reinterpret_cast<CUdeviceptr>(one.to), from = reinterpret_cast<CUdeviceptr>(one.from);
    check(driver().cuMemcpyDtoDAsync(to, from, one.bytes, stream), "copying");
  }
}

}  // namespace blade::cuda

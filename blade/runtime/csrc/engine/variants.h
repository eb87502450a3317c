// SPDX-License-Identifier: Apache-2.0
// An engine for several architectures has a complete program for each, one after the other in its text.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "device/accelerator.h"

namespace blade {

// Whether code for the architecture `code` runs on `device`'s: sm_80 on sm_86, sm_90a on sm_90 alone.
bool runs_on(const std::string& code, const std::string& device);

// Why a device cannot run the binaries of an architecture although it is one that fits; empty if it can.
std::string why_too_large(
    const std::vector<Binary>& binaries, const std::string& code, const Accelerator& accelerator, c10::DeviceIndex device);

// The program of `text` whose code suits the device best: that of the constants, else the current one. The first one
// where there is no such accelerator: loading it says so. Throws Unavailable if none of several suits the device.
std::string select_program(const std::string& text, const at::Tensor& object, const std::vector<at::Tensor>& constants);

}  // namespace blade

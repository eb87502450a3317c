// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace blade {

// Adds the functions `weight_facts` and `unchanged` to a Python module.
void define_unchanged(pybind11::module_& module);

}  // namespace blade

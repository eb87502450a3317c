// SPDX-License-Identifier: Apache-2.0
// Inputs that a program writes to.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "program/program.h"

namespace blade {

// Whether nothing else that the program reads or writes lies in the memory of an input it updates, and torch
// would let the caller write there.
bool may_update(
    const Program& program, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& constants);

// After a run on `ready`, contiguous forms of `inputs`: what was updated in a copy goes to the caller's tensor,
// and autograd hears of every write.
void finish_updates(
    const Program& program, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& ready);

}  // namespace blade

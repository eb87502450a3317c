// SPDX-License-Identifier: Apache-2.0
// Which engines this process may run: BLADE_ENGINES, BLADE_TRUSTED_KEYS, and the ops that programs may call.
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace blade {

// Empty where the environment admits engines of `backend`. BLADE_ENGINES=off admits none, BLADE_ENGINES=disc,openvino
// those two; unset or empty, all.
std::string why_not_admitted(const std::string& backend);

// Whether BLADE_TRUSTED_KEYS names keys, so that engines from files need a signature.
bool needs_signature();

// Empty if `signature` is one of a trusted key over the rest; Python checks it (blade/program/trust.py), and where there is
// none, nothing is trusted.
std::string why_untrusted(
    const std::vector<std::string>& words, const c10::Dict<std::string, int64_t>& limits,
    const std::vector<at::Tensor>& tensors, const std::string& signature);

// A number that Python knows by `blade_token` and code in a file does not: an engine constructed with it, as the limit
// "token", is one of this process, and any other is the file's whose TorchScript constructs it.
int64_t process_token();

// Whether the program of a file may call `op`, "aten::add": one of torch's functional ops, or one that somebody allowed.
bool may_call(const std::string& op);

// For the rest of this process. A program that was compiled in it allows the ops it calls.
void allow_call(const std::string& op);

}  // namespace blade

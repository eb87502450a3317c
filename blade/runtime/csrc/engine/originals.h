// SPDX-License-Identifier: Apache-2.0
// The originals that answer in this process where no captured path does.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <string>
#include <vector>

namespace blade {

// Python can call the original with this number (blade/runtime/originals.py), or can no longer.
void announce_original(int64_t number, bool is_known);

// The state of the original with this number is no longer what the paths were captured with.
void note_changed_original(int64_t number);
bool has_original_changed(int64_t number);

// How many calls it was asked to answer in this process.
int64_t original_calls(int64_t number);

// One more call that this path of a model answered; how many there were in this process since the last reset.
void count_path(int64_t number, int64_t path);
int64_t path_calls(int64_t number, int64_t path);
void reset_path_calls(int64_t number);

// What the original answers to the tuple `inputs`, `outputs` tensors; throws c10::Error with `text`, which is a RuntimeError in Python, if this
// process does not have it.
std::vector<at::Tensor> answer_by_original(
    c10::IValue inputs, int64_t number, int64_t outputs, const std::string& text);

}  // namespace blade

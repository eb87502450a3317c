// SPDX-License-Identifier: Apache-2.0
// The bytes of an ONNX model, read and extended without a library for protocol buffers.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace blade {

// onnx.TensorProto.DataType; throws std::runtime_error for a dtype that has none here.
int32_t onnx_type(at::ScalarType dtype);

// Throws std::runtime_error if `model` is none, reads files or has ops of other domains than ONNX's. `given`: names of the
// initializers whose contents the library receives in memory. blade/backends/shared/onnx/self_contained.py does the same.
void check_model(const std::string& model, const std::vector<std::string>& given);

// Appends the `tensors` as initializers called `names`: messages that follow one another are merged. They are on the CPU.
void add_initializers(std::string& model, const std::vector<std::string>& names, const std::vector<at::Tensor>& tensors);

}  // namespace blade

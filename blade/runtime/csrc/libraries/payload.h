// SPDX-License-Identifier: Apache-2.0
// What a backend made of its engine for a library that reads ONNX: blade/backends/shared/library_payload.py writes it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace blade {

struct LibraryPayload {
  std::vector<std::pair<std::string, std::string>> stamp;  // library -> the version that it was made and verified with
  std::vector<std::string> weights, inputs, outputs;       // the model's names
  std::vector<std::optional<std::vector<int64_t>>> orders;  // per output the order of its axes in memory
  std::string device;
  std::string model;

  // Whether the last output says that all indices are in range.
  bool is_flagged() const { return outputs.size() > orders.size(); }
  // Empty if nothing is said of `library`.
  std::string version_of(const std::string& library) const;
};

// Throws std::runtime_error if it is damaged, or has another number of weights than `constants`.
LibraryPayload read_payload(const at::Tensor& payload, size_t constants);

}  // namespace blade

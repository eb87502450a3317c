// SPDX-License-Identifier: Apache-2.0
#include "libraries/native_runner.h"

#include <ATen/Functions.h>

#include <stdexcept>

#include "libraries/onnx_bytes.h"

namespace blade {
namespace {

struct NativeBackend {
  const char* name;
  bool given_weights;  // weights are initializers without contents in its models, else inputs
  std::unique_ptr<NativeRunner> (*load)(LibraryPayload payload, const std::vector<at::Tensor>& constants);
};

constexpr NativeBackend kNativeBackends[] = {
    {"onnxruntime", true, &load_onnxruntime},
    {"openvino", false, &load_openvino},
};

const NativeBackend* find_native(const std::string& backend) {
  for (const auto& row : kNativeBackends) {
    if (backend == row.name) return &row;
  }
  return nullptr;
}

}  // namespace

bool has_native_runner(const std::string& backend) { return find_native(backend) != nullptr; }

std::unique_ptr<NativeRunner> load_native_runner(
    const std::string& backend, const at::Tensor& payload, const std::vector<at::Tensor>& constants) {
  const auto* row = find_native(backend);
  auto read = read_payload(payload, constants.size());
  if (read.device != "cpu") throw std::runtime_error("Engines of '" + backend + "' for GPUs need Python and `import blade`.");
  check_model(read.model, row->given_weights ? read.weights : std::vector<std::string>());
  return row->load(std::move(read), constants);
}

LibraryOutputs::LibraryOutputs(const Program& program, const std::vector<int64_t>& registers, const LibraryPayload& payload) {
  TORCH_CHECK(program.outputs.size() == payload.orders.size(), "the engine's program has other outputs than its model");
  for (size_t k = 0; k < program.outputs.size(); ++k) {
    const auto& slot = program.slots[program.outputs[k]];
    const auto& order = payload.orders[k];
    TORCH_CHECK(slot.kind == SlotKind::kOutput && (!order || order->size() == slot.sizes.size()), "output ", k, " has another rank");
    std::vector<int64_t> sizes, inverse(slot.sizes.size());
    for (size_t axis = 0; axis < slot.sizes.size(); ++axis) {
      const int64_t from = order ? (*order)[axis] : static_cast<int64_t>(axis);
      sizes.push_back(registers[slot.sizes[from]]);
      inverse[from] = static_cast<int64_t>(axis);
    }
    buffers.push_back(at::empty(sizes, at::TensorOptions().dtype(slot.dtype)));
    answers.push_back(order ? buffers.back().permute(inverse) : buffers.back());
  }
}

void* address_of(const at::Tensor& tensor) {
  static char nowhere[64];
  void* address = const_cast<void*>(tensor.const_data_ptr());
  return address == nullptr ? nowhere : address;
}

}  // namespace blade

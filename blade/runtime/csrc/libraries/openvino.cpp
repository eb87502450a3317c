// SPDX-License-Identifier: Apache-2.0
// OpenVINO by its C API, on torch's memory; weights are copied once, into the model. The settings, and what is refused, are
// those of blade/backends/openvino/session.py.
#include <ATen/Functions.h>
#include <dlfcn.h>

#include <stdexcept>

#include "libraries/find_library.h"
#include "libraries/onnx_bytes.h"
#include "libraries/sessions.h"

namespace blade {
namespace {

constexpr int64_t kLargestInteger = int64_t{1} << 28;  // int64 is computed in int32

const LibraryPlaces kOpenVinoPlaces{"BLADE_OPENVINO", {"libopenvino_c.so"}, "openvino/libs"};

struct OvShape {
  int64_t rank;
  const int64_t* dims;
};

struct OvVersion {
  const char* build_number;
  const char* description;
};

using OvObject = std::unique_ptr<void, void (*)(void*)>;

// The functions of a loaded library, which is never unloaded. All but those that return nothing return 0 for success.
struct OvApi {
  int (*get_version)(OvVersion*);
  void (*free_version)(OvVersion*);
  const char* (*last_error)();
  int (*create_core)(void**);
  void (*free_core)(void*);
  int (*read_model)(const void* core, const char* text, size_t length, const void* weights, void** model);
  void (*free_model)(void*);
  int (*compile)(const void* core, const void* model, const char* device, size_t texts, void** compiled, ...);
  void (*free_compiled)(void*);
  int (*input_by_name)(const void* compiled, const char* name, void** port);
  int (*output_by_index)(const void* compiled, size_t index, void** port);
  int (*element_type)(const void* port, int* type);
  void (*free_port)(void*);
  int (*create_request)(const void* compiled, void** request);
  void (*free_request)(void*);
  int (*set_input)(void* request, const void* port, const void* tensor);
  int (*set_output)(void* request, size_t index, const void* tensor);
  int (*get_output)(const void* request, size_t index, void** tensor);
  int (*infer)(void* request);
  int (*create_tensor)(int type, OvShape shape, void* data, void** tensor);
  int (*tensor_data)(const void* tensor, void** data);
  void (*free_tensor)(void*);

  // Throws std::runtime_error unless a call returned 0.
  void check(int status) const {
    if (status == 0) return;
    const char* message = last_error();
    throw std::runtime_error(std::string("OpenVINO: ") + (message == nullptr ? "error " + std::to_string(status) : message));
  }
};

template <typename Function>
bool look_up(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

bool look_up_all(void* library, OvApi& api) {
  return look_up(library, "ov_get_openvino_version", api.get_version) && look_up(library, "ov_version_free", api.free_version) &&
         look_up(library, "ov_get_last_err_msg", api.last_error) && look_up(library, "ov_core_create", api.create_core) &&
         look_up(library, "ov_core_free", api.free_core) &&
         look_up(library, "ov_core_read_model_from_memory_buffer", api.read_model) &&
         look_up(library, "ov_model_free", api.free_model) && look_up(library, "ov_core_compile_model", api.compile) &&
         look_up(library, "ov_compiled_model_free", api.free_compiled) &&
         look_up(library, "ov_compiled_model_input_by_name", api.input_by_name) &&
         look_up(library, "ov_compiled_model_output_by_index", api.output_by_index) &&
         look_up(library, "ov_port_get_element_type", api.element_type) &&
         look_up(library, "ov_output_const_port_free", api.free_port) &&
         look_up(library, "ov_compiled_model_create_infer_request", api.create_request) &&
         look_up(library, "ov_infer_request_free", api.free_request) &&
         look_up(library, "ov_infer_request_set_tensor_by_const_port", api.set_input) &&
         look_up(library, "ov_infer_request_set_output_tensor_by_index", api.set_output) &&
         look_up(library, "ov_infer_request_get_output_tensor_by_index", api.get_output) &&
         look_up(library, "ov_infer_request_infer", api.infer) &&
         look_up(library, "ov_tensor_create_from_host_ptr", api.create_tensor) &&
         look_up(library, "ov_tensor_data", api.tensor_data) && look_up(library, "ov_tensor_free", api.free_tensor);
}

// "2026.4.1", of "2026.4.1-22125-...", as PyPI's package has it.
std::string release_of(const OvApi& api) {
  OvVersion version{nullptr, nullptr};
  if (api.get_version(&version) != 0 || version.build_number == nullptr) return "";
  const std::string text = version.build_number;
  api.free_version(&version);
  return text.substr(0, text.find('-'));
}

// Throws std::runtime_error if no library of this version is found.
const OvApi& openvino_of_version(const std::string& version) {
  static std::mutex mutex;
  static auto* known = new std::map<std::string, OvApi>();
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = known->find(version); found != known->end()) return found->second;
  std::string others;
  for (const auto& file : library_candidates(kOpenVinoPlaces)) {
    OvApi api{};
    void* library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr || !look_up_all(library, api)) continue;
    if (const auto here = release_of(api); here != version) {
      others += (others.empty() ? " Found was " : ", ") + here;
      continue;
    }
    return known->emplace(version, api).first->second;
  }
  throw std::runtime_error(missing_library(kOpenVinoPlaces, version, others));
}

class OvSession {
 public:
  OvSession(const OvApi& api, const LibraryPayload& payload, const std::string& model, int threads) : api_(api) {
    core_ = make(api.free_core, [&](void** core) { return api.create_core(core); });
    const auto read = make(api.free_model, [&](void** made) {
      return api.read_model(core_.get(), model.data(), model.size(), nullptr, made);
    });
    const auto count = std::to_string(threads);
    compiled_ = make(api.free_compiled, [&](void** made) {
      return api.compile(
          core_.get(), read.get(), "CPU", size_t{8}, made, "PERFORMANCE_HINT", "LATENCY", "INFERENCE_PRECISION_HINT", "f32",
          "INFERENCE_NUM_THREADS", count.c_str(), "ENABLE_CPU_PINNING", "NO");  // torch's threads want the same cores
    });
    for (const auto& name : payload.inputs) inputs_.push_back(find_input(name));
    for (size_t k = 0; k < payload.orders.size(); ++k) {
      const auto port = make(api.free_port, [&](void** made) { return api.output_by_index(compiled_.get(), k, made); });
      output_types_.push_back(type_of(port.get()));
    }
  }

  // False if an index is out of range.
  bool run(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs, bool is_flagged) {
    OvObject request = take_request();
    std::vector<OvObject> tensors;  // until the request has them no more
    for (size_t k = 0; k < inputs.size(); ++k) {
      if (inputs_[k].port == nullptr) continue;
      tensors.push_back(tensor_of(inputs_[k].type, inputs[k]));
      api_.check(api_.set_input(request.get(), inputs_[k].port.get(), tensors.back().get()));
    }
    for (size_t k = 0; k < outputs.size(); ++k) {
      tensors.push_back(tensor_of(output_types_[k], outputs[k]));
      api_.check(api_.set_output(request.get(), k, tensors.back().get()));
    }
    api_.check(api_.infer(request.get()));
    const bool in_range = !is_flagged || read_flag(request.get(), outputs.size());
    const std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(std::move(request));
    return in_range;
  }

 private:
  struct Input {
    OvObject port;  // null: the model does not use it
    int type;
  };

  template <typename F>
  OvObject make(void (*release)(void*), const F& create) const {
    void* made = nullptr;
    api_.check(create(&made));
    return {made, release};
  }

  int type_of(const void* port) const {
    int type = 0;  // the library's number for it, which differs between versions
    api_.check(api_.element_type(port, &type));
    return type;
  }

  Input find_input(const std::string& name) const {
    void* port = nullptr;
    if (api_.input_by_name(compiled_.get(), name.c_str(), &port) != 0) return {{nullptr, api_.free_port}, 0};
    OvObject owned(port, api_.free_port);
    const int type = type_of(port);
    return {std::move(owned), type};
  }

  OvObject tensor_of(int type, const at::Tensor& tensor) const {
    return make(api_.free_tensor, [&](void** made) {
      return api_.create_tensor(type, OvShape{tensor.dim(), tensor.sizes().data()}, address_of(tensor), made);
    });
  }

  OvObject take_request() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!idle_.empty()) {
        OvObject request = std::move(idle_.back());
        idle_.pop_back();
        return request;
      }
    }
    return make(api_.free_request, [&](void** made) { return api_.create_request(compiled_.get(), made); });
  }

  bool read_flag(const void* request, size_t index) const {
    const auto tensor = make(api_.free_tensor, [&](void** made) { return api_.get_output(request, index, made); });
    void* data = nullptr;
    api_.check(api_.tensor_data(tensor.get(), &data));
    return *static_cast<const char*>(data) != 0;
  }

  const OvApi& api_;
  OvObject core_{nullptr, nullptr}, compiled_{nullptr, nullptr};
  std::vector<Input> inputs_;
  std::vector<int> output_types_;
  std::mutex mutex_;
  std::vector<OvObject> idle_;  // infer requests; one serves a call at a time
};

bool is_within(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return true;
  const auto [low, high] = at::aminmax(tensor);
  return low.item<int64_t>() >= -kLargestInteger && high.item<int64_t>() <= kLargestInteger;
}

class OvRunner : public NativeRunner {
 public:
  OvRunner(LibraryPayload payload, const std::vector<at::Tensor>& constants)
      : payload_(std::move(payload)),
        api_(openvino_of_version(payload_.version_of("openvino"))),
        sessions_(constants, [this, constants](int threads) {
          std::string model = payload_.model;
          add_initializers(model, payload_.weights, constants);
          return std::make_shared<OvSession>(api_, payload_, model, threads);
        }) {
    sessions_.get();
  }

  std::vector<at::Tensor> run(
      const std::vector<at::Tensor>& inputs, const Program& program, const std::vector<int64_t>& registers) override {
    TORCH_CHECK(inputs.size() == payload_.inputs.size(), "the engine's program has other inputs than its model");
    LibraryOutputs memory(program, registers, payload_);
    std::vector<at::Tensor> dense;
    for (const auto& input : inputs) {
      dense.push_back(input.contiguous());
      if (input.scalar_type() == at::kLong && !is_within(dense.back())) {
        throw std::runtime_error("an input has integers that OpenVINO, with 32 bits, might get wrong.");
      }
    }
    const bool in_range = sessions_.get()->run(dense, memory.buffers, payload_.is_flagged());
    if (!in_range) throw std::runtime_error("an index is out of range.");  // the original names the index
    return memory.answers;
  }

 private:
  const LibraryPayload payload_;
  const OvApi& api_;
  Sessions<OvSession> sessions_;
};

}  // namespace

std::unique_ptr<NativeRunner> load_openvino(LibraryPayload payload, const std::vector<at::Tensor>& constants) {
  return std::make_unique<OvRunner>(std::move(payload), constants);
}

}  // namespace blade

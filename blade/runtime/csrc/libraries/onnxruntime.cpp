// SPDX-License-Identifier: Apache-2.0
// ONNX Runtime by its C API, on torch's memory: inputs, outputs and weights are not copied. The settings are those of
// blade/backends/onnxruntime/device.py.
#include <dlfcn.h>

#include <array>
#include <cstdlib>
#include <stdexcept>

#include "libraries/find_library.h"
#include "libraries/onnx_bytes.h"
#include "libraries/sessions.h"

namespace blade {
namespace {

// OrtApi is a table of functions to which releases only append, so that a function is its position.
enum OrtFunction : size_t {
  kGetErrorMessage = 2,
  kCreateEnv = 3,
  kCreateSessionFromArray = 8,
  kRun = 9,
  kCreateSessionOptions = 10,
  kSetSessionExecutionMode = 13,
  kDisableMemPattern = 17,
  kSetSessionLogSeverityLevel = 22,
  kSetSessionGraphOptimizationLevel = 23,
  kSetIntraOpNumThreads = 24,
  kSetInterOpNumThreads = 25,
  kCreateTensorWithDataAsOrtValue = 49,
  kCreateCpuMemoryInfo = 69,
  kReleaseStatus = 93,
  kReleaseSession = 95,
  kReleaseValue = 96,
  kReleaseSessionOptions = 100,
  kAddSessionConfigEntry = 130,
  kAddExternalInitializers = 210,
};
constexpr uint32_t kOrtApiVersion = 12;  // the first with kAddExternalInitializers
constexpr int kAllOptimizations = 99, kSequential = 0, kFatal = 4, kDeviceAllocator = 0, kDefaultMemory = 0;

struct OrtApiBase {
  const void* const* (*get_api)(uint32_t version);
  const char* (*get_version)();
};

const LibraryPlaces kOrtPlaces{"BLADE_ONNXRUNTIME", {"libonnxruntime.so", "libonnxruntime.so.1"}, "onnxruntime/capi"};

// A loaded library of one version, with its environment. Never unloaded.
class Ort {
 public:
  // Throws std::runtime_error if no library of this version is found.
  static const Ort& of_version(const std::string& version);

  template <typename... Args>
  void call(OrtFunction function, Args... args) const {
    void* status = reinterpret_cast<void* (*)(Args...)>(const_cast<void*>(api_[function]))(args...);
    if (status == nullptr) return;
    const std::string message = reinterpret_cast<const char* (*)(const void*)>(const_cast<void*>(api_[kGetErrorMessage]))(status);
    release(kReleaseStatus, status);
    throw std::runtime_error("ONNX Runtime: " + message);
  }

  void release(OrtFunction function, void* object) const {
    if (object != nullptr) reinterpret_cast<void (*)(void*)>(const_cast<void*>(api_[function]))(object);
  }

  void* environment() const { return environment_; }

  // Over the memory of `tensor`, which is row-major and lives longer.
  void* value_of(const at::Tensor& tensor) const {
    void* value = nullptr;
    call(
        kCreateTensorWithDataAsOrtValue, static_cast<const void*>(memory_), address_of(tensor), tensor.nbytes(), tensor.sizes().data(),
        static_cast<size_t>(tensor.dim()), onnx_type(tensor.scalar_type()), &value);
    return value;
  }

 private:
  explicit Ort(const void* const* api) : api_(api) {
    call(kCreateEnv, kFatal, "blade", &environment_);
    call(kCreateCpuMemoryInfo, kDeviceAllocator, kDefaultMemory, &memory_);
  }

  const void* const* api_;
  void* environment_ = nullptr;
  void* memory_ = nullptr;
};

const Ort& Ort::of_version(const std::string& version) {
  static std::mutex mutex;
  static auto* known = new std::map<std::string, std::unique_ptr<Ort>>();
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = known->find(version); found != known->end()) return *found->second;
  // or the library writes an id of this machine into the home folder and sends events, from its first call on
  setenv("ORT_DISABLE_TELEMETRY", "1", /*replace=*/0);
  std::string others;
  for (const auto& file : library_candidates(kOrtPlaces)) {
    void* library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    auto* get_base = library == nullptr ? nullptr : reinterpret_cast<const OrtApiBase* (*)()>(dlsym(library, "OrtGetApiBase"));
    if (get_base == nullptr) continue;
    const std::string here = get_base()->get_version();
    if (here != version) {
      others += (others.empty() ? " Found was " : ", ") + here;
      continue;
    }
    const auto* api = get_base()->get_api(kOrtApiVersion);
    if (api == nullptr) continue;
    return *known->emplace(version, std::unique_ptr<Ort>(new Ort(api))).first->second;
  }
  throw std::runtime_error(missing_library(kOrtPlaces, version, others));
}

// Objects of the library that live as long as a call, or a session.
class OrtObjects {
 public:
  OrtObjects(const Ort& ort, OrtFunction release) : ort_(ort), release_(release) {}
  ~OrtObjects() {
    for (void* one : objects_) ort_.release(release_, one);
  }
  OrtObjects(const OrtObjects&) = delete;
  OrtObjects& operator=(const OrtObjects&) = delete;

  void* add(void* object) {
    objects_.push_back(object);
    return object;
  }
  void* const* data() const { return objects_.data(); }
  void** data() { return objects_.data(); }

 private:
  const Ort& ort_;
  const OrtFunction release_;
  std::vector<void*> objects_;
};

std::vector<const char*> pointers(const std::vector<std::string>& texts) {
  std::vector<const char*> found;
  for (const auto& text : texts) found.push_back(text.c_str());
  return found;
}

class OrtSession {
 public:
  OrtSession(const Ort& ort, const LibraryPayload& payload, const std::vector<at::Tensor>& constants, int threads)
      : ort_(ort), weights_(ort, kReleaseValue), session_(ort, kReleaseSession) {
    OrtObjects made(ort, kReleaseSessionOptions);
    void* options = nullptr;
    ort.call(kCreateSessionOptions, &options);
    made.add(options);
    ort.call(kSetSessionGraphOptimizationLevel, options, kAllOptimizations);
    ort.call(kSetSessionExecutionMode, options, kSequential);
    ort.call(kSetIntraOpNumThreads, options, threads);
    ort.call(kSetInterOpNumThreads, options, 1);
    ort.call(kSetSessionLogSeverityLevel, options, kFatal);
    ort.call(kDisableMemPattern, options);
    ort.call(kAddSessionConfigEntry, options, "session.force_spinning_stop", "1");
    for (const auto& constant : constants) {
      dense_.push_back(constant.contiguous());
      weights_.add(ort.value_of(dense_.back()));
    }
    const auto names = pointers(payload.weights);
    if (!names.empty()) ort.call(kAddExternalInitializers, options, names.data(), weights_.data(), names.size());
    void* session = nullptr;
    ort.call(
        kCreateSessionFromArray, ort.environment(), static_cast<const void*>(payload.model.data()), payload.model.size(), options,
        &session);
    session_.add(session);
  }

  void run(
      const std::vector<const char*>& input_names, const std::vector<at::Tensor>& inputs, const std::vector<const char*>& output_names,
      const std::vector<at::Tensor>& outputs) const {
    OrtObjects given(ort_, kReleaseValue), made(ort_, kReleaseValue);
    for (const auto& tensor : inputs) given.add(ort_.value_of(tensor));
    for (const auto& tensor : outputs) made.add(ort_.value_of(tensor));
    ort_.call(
        kRun, session_.data()[0], static_cast<const void*>(nullptr), input_names.data(), given.data(), inputs.size(),
        output_names.data(), outputs.size(), made.data());
  }

 private:
  const Ort& ort_;
  std::vector<at::Tensor> dense_;  // the session reads their memory
  OrtObjects weights_, session_;   // in this order: the session goes first
};

class OrtRunner : public NativeRunner {
 public:
  OrtRunner(LibraryPayload payload, const std::vector<at::Tensor>& constants)
      : payload_(std::move(payload)),
        ort_(Ort::of_version(payload_.version_of("onnxruntime"))),
        inputs_(pointers(payload_.inputs)),
        outputs_(pointers(payload_.outputs)),
        sessions_(constants, [this, constants](int threads) {
          return std::make_shared<OrtSession>(ort_, payload_, constants, threads);
        }) {
    if (payload_.is_flagged()) throw std::runtime_error("what it was compiled to is damaged (its outputs do not fit their orders).");
    sessions_.get();
  }

  std::vector<at::Tensor> run(
      const std::vector<at::Tensor>& inputs, const Program& program, const std::vector<int64_t>& registers) override {
    TORCH_CHECK(inputs.size() == inputs_.size(), "the engine's program has other inputs than its model");
    LibraryOutputs memory(program, registers, payload_);
    std::vector<at::Tensor> dense;
    for (const auto& input : inputs) dense.push_back(input.contiguous());
    sessions_.get()->run(inputs_, dense, outputs_, memory.buffers);
    return memory.answers;
  }

 private:
  const LibraryPayload payload_;
  const Ort& ort_;
  const std::vector<const char*> inputs_, outputs_;
  Sessions<OrtSession> sessions_;
};

}  // namespace

std::unique_ptr<NativeRunner> load_onnxruntime(LibraryPayload payload, const std::vector<at::Tensor>& constants) {
  return std::make_unique<OrtRunner>(std::move(payload), constants);
}

}  // namespace blade

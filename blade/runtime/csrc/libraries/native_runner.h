// SPDX-License-Identifier: Apache-2.0
// Engines of libraries in processes without Python: their C APIs, looked up when the first engine is loaded.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "libraries/payload.h"
#include "program/program.h"

namespace blade {

class NativeRunner {
 public:
  virtual ~NativeRunner() = default;
  // As Runner::run; keeps the inputs as they are. From any thread.
  virtual std::vector<at::Tensor> run(
      const std::vector<at::Tensor>& inputs, const Program& program, const std::vector<int64_t>& registers) = 0;
};

// Whether engines of `backend` can run without Python where its library is found.
bool has_native_runner(const std::string& backend);

// Throws std::runtime_error with a sentence if it cannot be used in this process.
std::unique_ptr<NativeRunner> load_native_runner(
    const std::string& backend, const at::Tensor& payload, const std::vector<at::Tensor>& constants);

// The runners themselves; `payload` is for the library.
std::unique_ptr<NativeRunner> load_onnxruntime(LibraryPayload payload, const std::vector<at::Tensor>& constants);
std::unique_ptr<NativeRunner> load_openvino(LibraryPayload payload, const std::vector<at::Tensor>& constants);

// New memory for the outputs of a program, which libraries write row-major, and views of it in the cluster's order of axes.
struct LibraryOutputs {
  LibraryOutputs(const Program& program, const std::vector<int64_t>& registers, const LibraryPayload& payload);
  std::vector<at::Tensor> buffers, answers;
};

// An address to pass for `tensor`; never null, which libraries take for a missing tensor.
void* address_of(const at::Tensor& tensor);

// Sessions of an engine, one per number of threads. Made anew where a weight was written in place, since a library may have
// folded it, and in a forked process, where the threads of the parent's sessions do not live.
template <typename Session>
class Sessions {
 public:
  using Start = std::function<std::shared_ptr<Session>(int threads)>;

  Sessions(std::vector<at::Tensor> constants, Start start);
  // For calls of this thread; throws what `start` throws.
  std::shared_ptr<Session> get();

 private:
  int64_t versions() const;

  const std::vector<at::Tensor> constants_;
  const Start start_;
  std::mutex mutex_;
  std::map<int, std::shared_ptr<Session>> made_;
  int64_t versions_ = 0;
  int process_ = 0;
};

}  // namespace blade

// SPDX-License-Identifier: Apache-2.0
// CUDA as an accelerator of the executor, registered when this library is loaded.
#include "device/accelerator.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <mutex>

#include "build.h"
#include "capture.h"
#include "copy.h"
#include "driver.h"
#include "kernel.h"

namespace blade::cuda {
namespace {

CUstream native(Stream stream) { return static_cast<CUstream>(stream); }

class CudaEvent final : public Event {
 public:
  CudaEvent() { check(driver().cuEventCreate(&event_, CU_EVENT_DEFAULT), "creating an event"); }
  ~CudaEvent() override {
    if (is_alive()) driver().cuEventDestroy(event_);
  }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  void record(Stream stream) override { check(driver().cuEventRecord(event_, native(stream)), "recording an event"); }
  void block(Stream stream) const override {
    check(driver().cuStreamWaitEvent(native(stream), event_, 0), "waiting for an event");
  }
  double seconds_since(const Event& earlier) const override {
    float milliseconds = 0;
    check(driver().cuEventSynchronize(event_), "waiting for an event");
    check(
        driver().cuEventElapsedTime(&milliseconds, static_cast<const CudaEvent&>(earlier).event_, event_), "timing");
    return milliseconds * 1e-3;
  }

 private:
  CUevent event_ = nullptr;
};

class Cuda final : public Accelerator {
 public:
  c10::DeviceType type() const override { return c10::kCUDA; }

  c10::DeviceIndex count() const override { return why_no_driver().empty() && is_alive() ? c10::cuda::device_count() : 0; }

  std::string architecture(c10::DeviceIndex device) const override {
    int major = 0, minor = 0;
    const CUdevice handle = device_of(device);
    check(driver().cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, handle), "asking a device");
    check(driver().cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, handle), "asking a device");
    return "sm_" + std::to_string(major) + std::to_string(minor);
  }

  size_t shared_memory(c10::DeviceIndex device) const override {
    int bytes = 0;
    check(
        driver().cuDeviceGetAttribute(&bytes, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device_of(device)), "asking a device");
    return static_cast<size_t>(bytes);
  }

  // A thread that has only allocated so far has no context yet.
  void enter(c10::DeviceIndex device) override {
    CUcontext context = nullptr;
    check(driver().cuCtxGetCurrent(&context), "asking for the context");
    if (C10_LIKELY(context != nullptr)) return;
    check(driver().cuCtxSetCurrent(primary_context(device)), "entering a device");
  }

  Stream current_stream(c10::DeviceIndex device) const override { return c10::cuda::getCurrentCUDAStream(device).stream(); }

  bool is_capturing(Stream stream) const override {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    const auto result = driver().cuStreamIsCapturing(native(stream), &status);
    if (result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) return true;  // the default stream, while another captures
    check(result, "asking a stream");
    return status != CU_STREAM_CAPTURE_STATUS_NONE;
  }

  std::unique_ptr<Kernel> load(const Binary& binary) override { return std::make_unique<CudaKernel>(binary); }
  std::unique_ptr<Event> make_event() override { return std::make_unique<CudaEvent>(); }
  void synchronize(Stream stream) override { check(driver().cuStreamSynchronize(native(stream)), "waiting for a stream"); }

  void zero(void* data, size_t bytes, Stream stream) override {
    if (bytes == 0) return;
    check(driver().cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(data), 0, bytes, native(stream)), "clearing memory");
  }

  void copy(const std::vector<Copy>& copies, Stream stream) override { copy_all(copies, native(stream)); }

  std::unique_ptr<Graph> record(
      c10::DeviceIndex device, Stream stream, Work kind, const std::function<void(Recorder&)>& work) override {
    if (kind == Work::kLaunches && can_build()) return build(stream, work);
    return capture(device, stream, kind == Work::kDraws, work);
  }

 private:
  static CUdevice device_of(c10::DeviceIndex device) {
    CUdevice handle = 0;
    check(driver().cuDeviceGet(&handle, device), "finding a device");
    return handle;
  }

  CUcontext primary_context(c10::DeviceIndex device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (contexts_.size() <= static_cast<size_t>(device)) contexts_.resize(device + 1, nullptr);
    auto& context = contexts_[device];
    if (context == nullptr) check(driver().cuDevicePrimaryCtxRetain(&context, device_of(device)), "entering a device");
    return context;
  }

  std::mutex mutex_;
  std::vector<CUcontext> contexts_;
};

[[maybe_unused]] const bool registered = [] {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("blade::register_accelerator", "");
  auto* cuda = new Cuda();  // engines may outlive static objects
  torch::jit::Stack stack{std::string("cuda"), kAcceleratorAbi, static_cast<int64_t>(reinterpret_cast<intptr_t>(cuda))};
  op.callBoxed(stack);
  return true;
}();

}  // namespace
}  // namespace blade::cuda

// SPDX-License-Identifier: Apache-2.0
#include "capture.h"

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <map>
#include <mutex>
#include <utility>

#include "driver.h"

// Of torch's CUDA runtime, if it is a shared one.
extern "C" __attribute__((weak)) cudaError_t cudaGetLastError();

namespace blade::cuda {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;
using Pool = decltype(at::cuda::graph_pool_handle());

class CudaGraph final : public Graph {
 public:
  explicit CudaGraph(CUgraph graph) { check(driver().cuGraphInstantiate(&exec_, graph, 0), "instantiating a graph"); }
  ~CudaGraph() override { driver().cuGraphExecDestroy(exec_); }  // the driver waits where it still runs
  CudaGraph(const CudaGraph&) = delete;
  CudaGraph& operator=(const CudaGraph&) = delete;

  void launch(Stream stream) override {
    check(driver().cuGraphLaunch(exec_, static_cast<CUstream>(stream)), "launching a graph");
  }

 private:
  CUgraphExec exec_ = nullptr;
};

// Where graphs of one stream are recorded: never on that stream, which may be the default one, and on none that
// others may use, because libraries keep workspaces by stream and the graphs go on using them. Graphs launched on
// one stream run one after the other, so they share all memory but their results. Both live as long as the process.
struct Recorder {
  CUstream stream = nullptr;
  Pool pool{};
  std::mutex busy;
};

Recorder& recorder_of(c10::DeviceIndex device, Stream stream) {
  static std::mutex mutex;
  static auto* recorders = new std::map<std::pair<c10::DeviceIndex, Stream>, std::unique_ptr<Recorder>>();
  const std::lock_guard<std::mutex> lock(mutex);
  auto& recorder = (*recorders)[{device, stream}];
  if (!recorder) {
    auto made = std::make_unique<Recorder>();
    check(driver().cuStreamCreate(&made->stream, CU_STREAM_NON_BLOCKING), "creating a stream");
    made->pool = at::cuda::graph_pool_handle();
    recorder = std::move(made);
  }
  return *recorder;
}

// torch from 2.13 on wants to know of captures; the functions are missing before.
template <typename A>
auto mark(A* of, c10::DeviceIndex device, bool begins, int) -> decltype(of->markCaptureBegin(device)) {
  begins ? of->markCaptureBegin(device) : of->markCaptureEnd(device);
}
template <typename A>
void mark(A*, c10::DeviceIndex, bool, long) {}

// A capture from begin to end: whatever happens between, it ends.
class Capture {
 public:
  Capture(c10::DeviceIndex device, const Recorder& recorder) : device_(device), recorder_(recorder) {
    allocator::beginAllocateToPool(device_, recorder_.pool, [own = recorder_.stream](cudaStream_t stream) { return stream == own; });
    const auto begun = driver().cuStreamBeginCapture(recorder_.stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    if (begun != CUDA_SUCCESS) allocator::endAllocateToPool(device_, recorder_.pool);
    check(begun, "beginning to capture");
    mark(allocator::get(), device_, /*begins=*/true, 0);
  }

  ~Capture() {
    if (ended_) return;
    CUgraph graph = nullptr;
    end(graph);
    if (graph != nullptr) driver().cuGraphDestroy(graph);
    // a call that capture forbids leaves its error behind, where the next check of torch would find it
    if (cudaGetLastError != nullptr) cudaGetLastError();
  }

  std::unique_ptr<Graph> finish() {
    CUgraph graph = nullptr;
    check(end(graph), "capturing");
    TORCH_CHECK(graph != nullptr, "blade: CUDA: nothing was captured");
    const std::unique_ptr<CUgraph_st, decltype(driver().cuGraphDestroy)> owner(graph, driver().cuGraphDestroy);
    return std::make_unique<CudaGraph>(graph);
  }

 private:
  CUresult end(CUgraph& graph) {
    ended_ = true;
    const auto result = driver().cuStreamEndCapture(recorder_.stream, &graph);
    mark(allocator::get(), device_, /*begins=*/false, 0);
    allocator::endAllocateToPool(device_, recorder_.pool);
    return result;
  }

  const c10::DeviceIndex device_;
  const Recorder& recorder_;
  bool ended_ = false;
};

}  // namespace

std::unique_ptr<Graph> capture(c10::DeviceIndex device, Stream stream, const std::function<void(Stream)>& work) {
  Recorder& recorder = recorder_of(device, stream);
  const std::unique_lock<std::mutex> lock(recorder.busy, std::try_to_lock);
  if (!lock.owns_lock()) return nullptr;
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromExternal(recorder.stream, device));
  Capture capture(device, recorder);
  work(recorder.stream);
  return capture.finish();
}

}  // namespace blade::cuda

// SPDX-License-Identifier: Apache-2.0
#include "capture.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <map>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

#include "copy.h"
#include "driver.h"
#include "graph.h"

// Of torch's CUDA runtime, if it is a shared one.
extern "C" __attribute__((weak)) cudaError_t cudaGetLastError();

namespace blade::cuda {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;
using Pool = decltype(at::cuda::graph_pool_handle());

// Torch's own: it gives every launch what torch's generators are at then, and moves them on.
class DrawingGraph : public at::cuda::CUDAGraph {
 public:
  DrawingGraph() : at::cuda::CUDAGraph(/*keep_graph=*/true) {}

  CUgraphExec exec() const { return graph_exec_; }

  // After a capture that failed: the generators draw outside of captures again.
  void give_up() {
    for (auto& entry : captured_generator_states_) leave(*entry.first, 0);
  }

 private:
  // torch from 2.12 on tells captures apart, and forgets one that failed with its graph
  template <typename S>
  static auto leave(S& state, int) -> decltype(void(state.capturing_)) {
    state.capturing_ = false;
  }
  template <typename S>
  static void leave(S&, long) {}
};

class DrawnGraph final : public CudaGraph {
 public:
  DrawnGraph(std::unique_ptr<DrawingGraph> drawing, Recorded recorded)
      : CudaGraph(drawing->exec(), std::move(recorded)), drawing_(std::move(drawing)) {}
  ~DrawnGraph() override {
    if (!is_alive()) drawing_.release();
  }

  void launch(Stream) override { drawing_->replay(); }  // on the current stream, which is this one

 private:
  std::unique_ptr<DrawingGraph> drawing_;  // owns the graph
};

// cuStreamGetCaptureInfo of CUDA 12 and of CUDA 13: the node that the stream's next one comes after.
using Dependencies = const CUgraphNode*;
[[maybe_unused]] CUresult last_nodes(
    CUresult (*info)(CUstream, CUstreamCaptureStatus*, cuuint64_t*, CUgraph*, Dependencies*, size_t*), CUstream stream,
    Dependencies* nodes, size_t* count) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  return info(stream, &status, nullptr, nullptr, nodes, count);
}
template <typename EdgeData>
[[maybe_unused]] CUresult last_nodes(
    CUresult (*info)(CUstream, CUstreamCaptureStatus*, cuuint64_t*, CUgraph*, Dependencies*, EdgeData, size_t*),
    CUstream stream, Dependencies* nodes, size_t* count) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  EdgeData edges = nullptr;
  std::remove_pointer_t<EdgeData> data = nullptr;
  edges = &data;
  return info(stream, &status, nullptr, nullptr, nodes, edges, count);
}

// Where graphs to be launched on one stream are recorded: never on that stream, which may be the default one, and on none that
// others may use, because libraries keep workspaces by stream and the graphs go on using them. Graphs launched on
// one stream run one after the other, so they share all memory but their results. Both live as long as the process.
struct Place {
  CUstream stream = nullptr;
  Pool pool{};
  std::mutex busy;
};

Place& place_of(c10::DeviceIndex device, Stream stream) {
  static std::mutex mutex;
  static auto* places = new std::map<std::pair<c10::DeviceIndex, Stream>, std::unique_ptr<Place>>();
  const std::lock_guard<std::mutex> lock(mutex);
  auto& place = (*places)[{device, stream}];
  if (!place) {
    auto made = std::make_unique<Place>();
    check(driver().cuStreamCreate(&made->stream, CU_STREAM_NON_BLOCKING), "creating a stream");
    made->pool = at::cuda::graph_pool_handle();
    // one user more than its graphs, which give it back one by one: torch takes no pool again that had none left.
    // Pinned memory has pools of the same names, of which torch's own graphs are users, too.
    allocator::beginAllocateToPool(device, made->pool, [](cudaStream_t) { return false; });
    allocator::endAllocateToPool(device, made->pool);
    at::getHostAllocator(at::kCUDA)->begin_allocate_to_pool(made->pool, [](c10::Stream) { return false; });
    at::getHostAllocator(at::kCUDA)->end_allocate_to_pool(made->pool);
    place = std::move(made);
  }
  return *place;
}

// torch from 2.13 on wants to know of captures; the functions are missing before.
template <typename A>
auto mark(A* of, c10::DeviceIndex device, bool begins, int) -> decltype(of->markCaptureBegin(device)) {
  begins ? of->markCaptureBegin(device) : of->markCaptureEnd(device);
}
template <typename A>
void mark(A*, c10::DeviceIndex, bool, long) {}

// A capture from begin to end: whatever happens between, it ends.
class Capture final : public Recorder {
 public:
  // The place's stream is the current one.
  Capture(c10::DeviceIndex device, const Place& place, bool draws) : device_(device), place_(place) {
    if (draws) {
      drawing_ = std::make_unique<DrawingGraph>();
      try {
        drawing_->capture_begin(place_.pool, cudaStreamCaptureModeThreadLocal);
      } catch (...) {
        drawing_->give_up();  // which knew of the capture before it began
        stop_allocating();
        throw;
      }
      return;
    }
    allocator::beginAllocateToPool(device_, place_.pool, [own = place_.stream](cudaStream_t stream) { return stream == own; });
    const auto begun = driver().cuStreamBeginCapture(place_.stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    if (begun != CUDA_SUCCESS) allocator::endAllocateToPool(device_, place_.pool);
    check(begun, "beginning to capture");
    mark(allocator::get(), device_, /*begins=*/true, 0);
  }

  ~Capture() override {
    if (ended_) return;
    CUgraph graph = nullptr;
    end(graph);
    if (graph != nullptr) driver().cuGraphDestroy(graph);
    if (drawing_) drawing_->give_up();
    // a call that capture forbids leaves its error behind, where the next check of torch would find it
    if (cudaGetLastError != nullptr) cudaGetLastError();
  }

  std::unique_ptr<Graph> finish() {
    if (drawing_) {
      drawing_->capture_end();
      ended_ = true;
      drawing_->instantiate();
      // what beginning did to the generator's state is done before the first launch
      check(driver().cuStreamSynchronize(place_.stream), "waiting for a stream");
      return std::make_unique<DrawnGraph>(std::move(drawing_), std::move(recorded_));
    }
    CUgraph graph = nullptr;
    check(end(graph), "capturing");
    TORCH_CHECK(graph != nullptr, "blade: CUDA: nothing was captured");
    return std::make_unique<CudaGraph>(graph, std::move(recorded_));
  }

  Stream stream() const override { return place_.stream; }

  bool copy(const std::vector<Copy>& copies) override {
    auto launches = launches_of(copies);
    if (!launches) return false;
    RecordedCopies recorded;
    for (auto& one : *launches) {
      one.launch(place_.stream);
      recorded.nodes.push_back(last_node());
    }
    recorded.launches = std::move(*launches);
    recorded_.copies.push_back(std::move(recorded));
    return true;
  }

  void launch(const Kernel& kernel, const Grid& grid, void** params) override {
    kernel.launch(grid, params, place_.stream);
  }

  void keep_launch() override { recorded_.launches.push_back(last_node()); }

 private:
  CUgraphNode last_node() const {
    Dependencies nodes = nullptr;
    size_t count = 0;
    check(last_nodes(driver().cuStreamGetCaptureInfo, place_.stream, &nodes, &count), "asking a capture");
    TORCH_CHECK(count == 1, "blade: CUDA: what was captured last has ", count, " nodes");
    return nodes[0];
  }

  CUresult end(CUgraph& graph) {
    ended_ = true;
    const auto result = driver().cuStreamEndCapture(place_.stream, &graph);
    if (!drawing_) mark(allocator::get(), device_, /*begins=*/false, 0);
    stop_allocating();
    return result;
  }

  // As far as it had begun: what is left begun makes every later capture fail.
  void stop_allocating() {
    const auto stop = [](const auto& one) {
      try {
        one();
      } catch (const c10::Error&) {  // it had not
      }
    };
    stop([this] { allocator::endAllocateToPool(device_, place_.pool); });
    if (drawing_) stop([this] { at::getHostAllocator(at::kCUDA)->end_allocate_to_pool(place_.pool); });
  }

  const c10::DeviceIndex device_;
  const Place& place_;
  std::unique_ptr<DrawingGraph> drawing_;
  Recorded recorded_;
  bool ended_ = false;
};

}  // namespace

std::unique_ptr<Graph> capture(
    c10::DeviceIndex device, Stream stream, bool draws, const std::function<void(Recorder&)>& work) {
  Place& place = place_of(device, stream);
  const std::unique_lock<std::mutex> lock(place.busy, std::try_to_lock);
  if (!lock.owns_lock()) return nullptr;
  // beginning sets the generator's state on the device, which launches so far may be yet to read
  if (draws) check(driver().cuStreamSynchronize(static_cast<CUstream>(stream)), "waiting for a stream");
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromExternal(place.stream, device));
  Capture capture(device, place, draws);
  work(capture);
  return capture.finish();
}

}  // namespace blade::cuda

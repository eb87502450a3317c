// SPDX-License-Identifier: Apache-2.0
#include "build.h"

#include <utility>

#include "copy.h"
#include "driver.h"
#include "graph.h"
#include "kernel.h"

namespace blade::cuda {
namespace {

// One node after the other, as on a stream.
class Builder final : public Recorder {
 public:
  explicit Builder(Stream stream) : stream_(stream) { check(driver().cuGraphCreate(&graph_, 0), "making a graph"); }
  ~Builder() override {
    if (graph_ != nullptr) driver().cuGraphDestroy(graph_);
  }
  Builder(const Builder&) = delete;
  Builder& operator=(const Builder&) = delete;

  Stream stream() const override { return stream_; }

  void launch(const Kernel& kernel, const Grid& grid, void** params) override {
    const auto& own = static_cast<const CudaKernel&>(kernel);
    add(own.node(grid, params), own.is_early());
  }

  bool copy(const std::vector<Copy>& copies) override {
    auto launches = launches_of(copies);
    if (!launches) return false;
    RecordedCopies recorded;
    for (auto& one : *launches) {
      add(one.node(), /*early=*/false);
      recorded.nodes.push_back(last_);
    }
    recorded.launches = std::move(*launches);
    recorded_.copies.push_back(std::move(recorded));
    return true;
  }

  void keep_launch() override { recorded_.launches.push_back(last_); }

  std::unique_ptr<Graph> finish() {
    TORCH_CHECK(last_ != nullptr, "blade: CUDA: nothing was recorded");
    return std::make_unique<CudaGraph>(std::exchange(graph_, nullptr), std::move(recorded_));
  }

 private:
  // `early`: after the last node's blocks have let it go, which is what capturing makes of such a launch.
  void add(const CUDA_KERNEL_NODE_PARAMS_v3& kernel, bool early) {
    CUgraphNodeParams params{};
    params.type = CU_GRAPH_NODE_TYPE_KERNEL;
    params.kernel = kernel;
    CUgraphEdgeData edge{};
    if (early) {
      edge.from_port = CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC;
      edge.type = CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC;
    }
    CUgraphNode node = nullptr;
    const size_t before = last_ == nullptr ? 0 : 1;
    check(driver().cuGraphAddNode_v2(&node, graph_, &last_, before ? &edge : nullptr, before, &params), "recording a launch");
    last_ = node;
  }

  const Stream stream_;
  CUgraph graph_ = nullptr;
  CUgraphNode last_ = nullptr;
  Recorded recorded_;
};

}  // namespace

bool can_build() { return driver().cuGraphAddNode_v2 != nullptr; }

std::unique_ptr<Graph> build(Stream stream, const std::function<void(Recorder&)>& work) {
  Builder builder(stream);
  work(builder);
  return builder.finish();
}

}  // namespace blade::cuda

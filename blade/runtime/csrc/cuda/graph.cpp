// SPDX-License-Identifier: Apache-2.0
#include "graph.h"

#include "driver.h"

namespace blade::cuda {

CudaGraph::CudaGraph(CUgraph graph, Recorded recorded) : graph_(graph), recorded_(std::move(recorded)) {
  const auto result = driver().cuGraphInstantiate(&exec_, graph_, 0);
  if (result != CUDA_SUCCESS) driver().cuGraphDestroy(graph_);
  check(result, "instantiating a graph");
}

CudaGraph::~CudaGraph() {
  if (graph_ == nullptr || !is_alive()) return;
  driver().cuGraphExecDestroy(exec_);  // the driver waits where it still runs
  driver().cuGraphDestroy(graph_);
}

void CudaGraph::set_copies(size_t k, const std::vector<Copy>& copies) {
  auto& recorded = recorded_.copies[k];
  for (size_t i = 0; i < recorded.nodes.size(); ++i) {
    if (recorded.launches[i].set(copies)) recorded.launches[i].set_node(exec_, recorded.nodes[i]);
  }
}

void CudaGraph::set_launch(size_t k, void** params) {
  CUDA_KERNEL_NODE_PARAMS all{};
  check(driver().cuGraphKernelNodeGetParams(recorded_.launches[k], &all), "asking a graph");
  all.kernelParams = params;
  check(driver().cuGraphExecKernelNodeSetParams(exec_, recorded_.launches[k], &all), "changing a launch of a graph");
}

void CudaGraph::launch(Stream stream) {
  check(driver().cuGraphLaunch(exec_, static_cast<CUstream>(stream)), "launching a graph");
}

}  // namespace blade::cuda

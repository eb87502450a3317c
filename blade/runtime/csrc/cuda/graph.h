// SPDX-License-Identifier: Apache-2.0
// A graph whose copies and launches may be given other addresses.
#pragma once

#include <cuda.h>

#include <vector>

#include "device/accelerator.h"
#include "copy.h"

namespace blade::cuda {

// Where in a graph copies are, and what they were last.
struct RecordedCopies {
  std::vector<CopyLaunch> launches;
  std::vector<CUgraphNode> nodes;
};

struct Recorded {
  std::vector<RecordedCopies> copies;
  std::vector<CUgraphNode> launches;  // that were kept
};

class CudaGraph : public Graph {
 public:
  // Owns the graph, whatever happens: its nodes are how the executable one is changed.
  CudaGraph(CUgraph graph, Recorded recorded);
  ~CudaGraph() override;
  CudaGraph(const CudaGraph&) = delete;
  CudaGraph& operator=(const CudaGraph&) = delete;

  // Launches that were enqueued before keep what they were enqueued with.
  void set_copies(size_t k, const std::vector<Copy>& copies) override;
  void set_launch(size_t k, void** params) override;
  void launch(Stream stream) override;

 protected:
  // Of a graph that the caller owns.
  CudaGraph(CUgraphExec exec, Recorded recorded) : exec_(exec), recorded_(std::move(recorded)) {}

 private:
  CUgraph graph_ = nullptr;
  CUgraphExec exec_ = nullptr;
  Recorded recorded_;
};

}  // namespace blade::cuda

// SPDX-License-Identifier: Apache-2.0
// What one call at a time uses: an arena and the execution plans over it. On an accelerator it belongs to one of
// its streams, whose order keeps the calls apart.
#pragma once

#include <list>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "execute/execution_plan.h"
#include "graphs/captured_graph.h"

namespace blade {

class StreamContext {
 public:
  using Key = c10::SmallVector<int64_t, 24>;  // the sizes of all inputs

  // On the current device and stream, which are those of `place`.
  explicit StreamContext(const Place& place) : place_(place), arenas_(place.device.type()) {}

  // An execution plan and what graphs make of it: one, or several where what one lent is out, or others lend what it reads.
  struct Shape {
    Shape(const Loaded& loaded, const std::vector<at::Tensor>& inputs, Arenas& arenas, const Place& place)
        : plan(std::make_unique<ExecutionPlan>(loaded, inputs, arenas, place)) {}
    std::unique_ptr<ExecutionPlan> plan;
    std::list<CapturedGraph> captured_graphs;  // most recently used first

    // Whether launching takes long beside the work. Looked at where a graph would keep much memory.
    enum class Pace { kUnknown, kLaunching, kWork };
    Pace pace = Pace::kUnknown;
    int calls = 0;  // while it was unknown
  };

  bool is_at(const Place& place) const { return place_.device == place.device && place_.stream == place.stream; }

  Shape& shape_for(const Loaded& loaded, const std::vector<at::Tensor>& inputs, size_t max_shapes);

  // One call of the shape used last.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs, std::vector<double>* seconds);

  // The same on an accelerator, by a graph where that is possible.
  std::vector<at::Tensor> run_graphed(
      const std::vector<at::Tensor>& inputs, const GraphLimits& limits, GraphCounts& counts);

  // Drops the shape used last.
  void drop_front();

  struct Bytes {
    size_t arenas = 0;  // intermediate values
    size_t graphs = 0;  // what graphs read and write at fixed addresses
    size_t lent = 0;    // outputs that callers get themselves
    size_t all() const { return arenas + graphs + lent; }
  };
  Bytes bytes() const;

 private:
  std::vector<at::Tensor> run_large(Shape& shape, const std::vector<at::Tensor>& inputs, GraphCounts& counts);
  void make_room_for_a_graph(size_t max_graphs);
  CapturedGraph& captured_graph_for(Shape& shape, const std::vector<at::Tensor>& inputs);
  BufferSet& buffer_set(size_t number);
  std::vector<at::Tensor> outside_fixed(const std::vector<at::Tensor>& inputs) const;

  struct KeyHash {
    size_t operator()(const Key& sizes) const;
  };
  using Entry = std::pair<Key, std::unique_ptr<Shape>>;

  const Place place_;
  Arenas arenas_;
  std::unique_ptr<Arena> fixed_;  // what graphs read and write beside it
  std::vector<std::unique_ptr<BufferSet>> buffer_sets_;
  std::list<Entry> plans_;  // most recently used first
  std::unordered_map<Key, std::list<Entry>::iterator, KeyHash> index_;
};

}  // namespace blade

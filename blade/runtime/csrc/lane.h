// SPDX-License-Identifier: Apache-2.0
// What one call at a time uses: an arena and the frames over it. On an accelerator it belongs to one of
// its streams, whose order keeps the calls apart.
#pragma once

#include <list>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "frame.h"
#include "recording.h"

namespace blade {

class Lane {
 public:
  using Key = c10::SmallVector<int64_t, 24>;  // the sizes of all inputs

  // On the current device and stream, which are those of `place`.
  explicit Lane(const Place& place) : place_(place), arena_(place.device.type()) {}

  // A frame and what graphs make of it: one, or several where what one lent is out, or others lend what it reads.
  struct Shape {
    Shape(const Loaded& loaded, const std::vector<at::Tensor>& inputs, const Arena& arena, const Place& place)
        : frame(loaded, inputs, arena, place) {}
    Frame frame;
    std::list<Recording> recordings;  // most recently used first
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

  size_t bytes() const;

 private:
  // Room for a call; gives back, now and then, what none needed for long.
  void reserve(size_t bytes);
  void make_room_for_a_graph(size_t max_graphs);
  Recording& recording_for(Shape& shape, const std::vector<at::Tensor>& inputs);
  Generation& generation(size_t number);
  std::vector<at::Tensor> outside_fixed(const std::vector<at::Tensor>& inputs) const;

  struct KeyHash {
    size_t operator()(const Key& sizes) const;
  };
  using Entry = std::pair<Key, std::unique_ptr<Shape>>;

  const Place place_;
  Arena arena_;
  std::unique_ptr<Arena> fixed_;  // what graphs read and write beside it
  std::vector<std::unique_ptr<Generation>> generations_;
  std::list<Entry> frames_;  // most recently used first
  std::unordered_map<Key, std::list<Entry>::iterator, KeyHash> index_;
  size_t peak_ = 0;
  int calls_ = 0;
};

}  // namespace blade

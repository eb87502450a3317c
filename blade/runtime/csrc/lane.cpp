// SPDX-License-Identifier: Apache-2.0
#include "lane.h"

#include <algorithm>

namespace blade {
namespace {

// Graphs of one shape: as many calls may hold what they were lent at once.
constexpr size_t kMostRecordings = 4;

// How many calls pass before a lane gives back memory that none of them needed.
constexpr int kShrinkPeriod = 256;

Lane::Key key_of(const std::vector<at::Tensor>& inputs) {
  Lane::Key key;
  for (const auto& input : inputs) key.append(input.sizes().begin(), input.sizes().end());
  return key;
}

}  // namespace

size_t Lane::bytes() const {
  size_t total = arena_.capacity() + (fixed_ ? fixed_->capacity() : 0);
  for (const auto& one : generations_) total += one->arena().capacity();
  return total;
}

size_t Lane::KeyHash::operator()(const Key& sizes) const {
  uint64_t hash = 14695981039346656037ull;
  for (const int64_t size : sizes) hash = (hash ^ static_cast<uint64_t>(size)) * 1099511628211ull;
  return static_cast<size_t>(hash ^ (hash >> 32));
}

Lane::Shape& Lane::shape_for(const Loaded& loaded, const std::vector<at::Tensor>& inputs, size_t max_shapes) {
  Key key = key_of(inputs);
  if (!frames_.empty() && frames_.front().first == key) return *frames_.front().second;
  const auto found = index_.find(key);
  if (found != index_.end()) {
    frames_.splice(frames_.begin(), frames_, found->second);
    return *frames_.front().second;
  }
  auto shape = std::make_unique<Shape>(loaded, inputs, arena_, place_);
  if (frames_.size() >= max_shapes) {
    index_.erase(frames_.back().first);
    frames_.pop_back();
  }
  frames_.emplace_front(key, std::move(shape));
  index_.emplace(std::move(key), frames_.begin());
  return *frames_.front().second;
}

void Lane::drop_front() {
  if (frames_.empty()) return;
  index_.erase(frames_.front().first);
  frames_.pop_front();
}

void Lane::reserve(size_t bytes) {
  arena_.reserve(bytes);
  peak_ = std::max(peak_, bytes);
  if (++calls_ < kShrinkPeriod) return;
  if (peak_ < arena_.capacity() / 2) arena_.shrink(peak_);
  calls_ = 0;
  peak_ = bytes;
}

std::vector<at::Tensor> Lane::run(const std::vector<at::Tensor>& inputs, std::vector<double>* seconds) {
  Frame& frame = frames_.front().second->frame;
  reserve(frame.arena_bytes());
  return frame.run(inputs, seconds);
}

// The least recently used ones go.
void Lane::make_room_for_a_graph(size_t max_graphs) {
  size_t kept = 0;
  for (auto& entry : frames_) {
    for (auto& recording : entry.second->recordings) {
      if (recording.has_graph() && ++kept >= max_graphs) recording.evict();
    }
  }
}

// Outputs of graphs that were handed out may come back as inputs, and those buffers are about to be written.
std::vector<at::Tensor> Lane::outside_fixed(const std::vector<at::Tensor>& inputs) const {
  auto outside = inputs;
  for (auto& input : outside) {
    const auto* data = static_cast<const char*>(input.const_data_ptr());
    if (data >= fixed_->data() && data < fixed_->data() + fixed_->capacity()) input = input.clone();
  }
  return outside;
}

Generation& Lane::generation(size_t number) {
  while (generations_.size() <= number) generations_.push_back(std::make_unique<Generation>(place_.device.type()));
  return *generations_[number];
}

// One whose graph can be launched, else one that has none yet; one more where what is lent keeps all from being launched.
Recording& Lane::recording_for(Shape& shape, const std::vector<at::Tensor>& inputs) {
  auto& all = shape.recordings;
  if (all.empty()) all.emplace_front(shape.frame, 0);
  const auto first = [&](const auto& test) {
    const auto found = std::find_if(all.begin(), all.end(), test);
    if (found != all.end()) all.splice(all.begin(), all, found);
    return found != all.end();
  };
  if (first([&](const Recording& one) { return one.is_ready(inputs, generation(one.generation())); })) return all.front();
  if (first([](const Recording& one) { return !one.has_graph(); })) return all.front();
  const auto is_hindered = [&](const Recording& one) {
    return one.is_out(generation(one.generation())) || one.is_elsewhere_lent(inputs);
  };
  if (!std::all_of(all.begin(), all.end(), is_hindered)) return all.front();
  size_t number = all.size();
  if (number == kMostRecordings) {
    number = all.back().generation();
    all.pop_back();
  }
  return all.emplace_front(shape.frame, number);
}

std::vector<at::Tensor> Lane::run_graphed(
    const std::vector<at::Tensor>& given, const GraphLimits& limits, GraphCounts& counts) {
  std::vector<at::Tensor> outside;
  if (limits.reuse_outputs && fixed_) outside = outside_fixed(given);
  const auto& inputs = outside.empty() ? given : outside;
  auto& shape = *frames_.front().second;
  reserve(shape.frame.arena_bytes());
  if (!fixed_) fixed_ = std::make_unique<Arena>(place_.device.type());
  auto& recording = recording_for(shape, inputs);
  const GraphMemory memory{*fixed_, generation(recording.generation())};
  const bool due = recording.wants_capture(inputs, limits, counts) && !memory.lent.is_out();
  if (due) make_room_for_a_graph(limits.max_graphs);
  if (recording.has_graph() || (due && recording.capture(inputs, memory, limits, counts))) {
    if (auto outputs = recording.replay(inputs, memory, counts)) return std::move(*outputs);
  }
  return shape.frame.run(inputs);
}

}  // namespace blade

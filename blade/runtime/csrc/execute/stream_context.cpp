// SPDX-License-Identifier: Apache-2.0
#include "execute/stream_context.h"

#include <algorithm>

namespace blade {
namespace {

// Graphs of one shape: as many calls may hold what they were lent at once.
constexpr size_t kMaxCapturedGraphs = 4;

// Work that takes so many times as long as launching it hides that, and what happens between engines.
constexpr double kHidesLaunching = 2;

// Seconds of a launch or call on average that hide the pause before the next one, which a graph makes shorter.
constexpr double kHidesPauses = 20e-6;

// Bytes that a graph keeps and that a call would let go of: from here on a graph has to be worth them.
constexpr size_t kMuch = size_t{256} << 20;

// Bytes of a value that has memory of its own where there is no graph: torch's allocator gives them to others meanwhile.
constexpr size_t kApart = size_t{4} << 20;

// Calls of a shape in which the host may still have to ask the device for memory.
constexpr int kMostTimedCalls = 4;

// Would a graph of it keep much besides what callers hold anyway?
bool keeps_much(const ExecutionPlan& plan, const GraphLimits& limits) {
  if (limits.always) return false;
  return plan.arena_bytes() + CapturePolicy(plan, /*may_move=*/true, limits).bytes_of_results() >= kMuch;
}

StreamContext::Key key_of(const std::vector<at::Tensor>& inputs) {
  StreamContext::Key key;
  for (const auto& input : inputs) key.append(input.sizes().begin(), input.sizes().end());
  return key;
}

}  // namespace

StreamContext::Bytes StreamContext::bytes() const {
  Bytes found{arenas_.bytes(), fixed_ ? fixed_->capacity() : 0, 0};
  for (const auto& one : buffer_sets_) found.lent += one->arena().capacity();
  return found;
}

size_t StreamContext::KeyHash::operator()(const Key& sizes) const {
  uint64_t hash = 14695981039346656037ull;
  for (const int64_t size : sizes) hash = (hash ^ static_cast<uint64_t>(size)) * 1099511628211ull;
  return static_cast<size_t>(hash ^ (hash >> 32));
}

StreamContext::Shape& StreamContext::shape_for(const Loaded& loaded, const std::vector<at::Tensor>& inputs, size_t max_shapes) {
  Key key = key_of(inputs);
  if (!plans_.empty() && plans_.front().first == key) return *plans_.front().second;
  const auto found = index_.find(key);
  if (found != index_.end()) {
    plans_.splice(plans_.begin(), plans_, found->second);
    return *plans_.front().second;
  }
  auto shape = std::make_unique<Shape>(loaded, inputs, arenas_, place_);
  if (plans_.size() >= max_shapes) {
    index_.erase(plans_.back().first);
    plans_.pop_back();
  }
  plans_.emplace_front(key, std::move(shape));
  index_.emplace(std::move(key), plans_.begin());
  return *plans_.front().second;
}

void StreamContext::drop_front() {
  if (plans_.empty()) return;
  index_.erase(plans_.front().first);
  plans_.pop_front();
}

std::vector<at::Tensor> StreamContext::run(const std::vector<at::Tensor>& inputs, std::vector<double>* seconds) {
  ExecutionPlan& plan = *plans_.front().second->plan;
  arenas_.first().reserve(plan.arena_bytes());
  return plan.run(inputs, seconds);
}

// Launch by launch, without memory that stays. The first call is not timed, as it loads code.
std::vector<at::Tensor> StreamContext::run_large(Shape& shape, const std::vector<at::Tensor>& inputs, GraphCounts& counts) {
  using Pace = Shape::Pace;
  arenas_.first().reserve(shape.plan->arena_bytes());
  if (shape.pace == Pace::kWork || ++shape.calls == 1) return shape.plan->run(inputs);
  auto timed = shape.plan->run_timed(inputs);
  if (timed.work >= std::max(kHidesLaunching * timed.launching, kHidesPauses * static_cast<double>(timed.steps))) {
    shape.pace = Pace::kWork;
    counts.declined.fetch_add(1, std::memory_order_relaxed);
  } else if (timed.steady || shape.calls == kMostTimedCalls) {
    shape.pace = Pace::kLaunching;
    shape.plan = shape.plan->planned_again(inputs, ExecutionPlan::kNoneApart);
  }
  return std::move(timed.outputs);
}

// The least recently used ones go.
void StreamContext::make_room_for_a_graph(size_t max_graphs) {
  size_t kept = 0;
  for (auto& entry : plans_) {
    for (auto& captured_graph : entry.second->captured_graphs) {
      if (captured_graph.has_graph() && ++kept >= max_graphs) captured_graph.evict();
    }
  }
}

// Outputs of graphs that were handed out may come back as inputs, and those buffers are about to be written.
std::vector<at::Tensor> StreamContext::outside_fixed(const std::vector<at::Tensor>& inputs) const {
  auto outside = inputs;
  for (auto& input : outside) {
    const auto* data = static_cast<const char*>(input.const_data_ptr());
    if (data >= fixed_->data() && data < fixed_->data() + fixed_->capacity()) input = input.clone();
  }
  return outside;
}

BufferSet& StreamContext::buffer_set(size_t number) {
  while (buffer_sets_.size() <= number) buffer_sets_.push_back(std::make_unique<BufferSet>(place_.device.type()));
  return *buffer_sets_[number];
}

// One whose graph can be launched, of several the one recorded first: what it leaves keeps none of the others from being
// launched. Else one that has none yet; one more where what is lent keeps all from being launched.
CapturedGraph& StreamContext::captured_graph_for(Shape& shape, const std::vector<at::Tensor>& inputs) {
  auto& all = shape.captured_graphs;
  if (all.empty()) all.emplace_front(*shape.plan, 0);
  const auto first = [&](const auto& test) {
    const auto found = std::find_if(all.begin(), all.end(), test);
    if (found != all.end()) all.splice(all.begin(), all, found);
    return found != all.end();
  };
  const CapturedGraph* ready = nullptr;
  for (const auto& one : all) {
    if ((ready == nullptr || one.number() < ready->number()) && one.is_ready(inputs, buffer_set(one.buffer_set()))) ready = &one;
  }
  if (ready != nullptr && first([&](const CapturedGraph& one) { return &one == ready; })) return all.front();
  if (first([](const CapturedGraph& one) { return !one.has_graph(); })) return all.front();
  const auto is_hindered = [&](const CapturedGraph& one) {
    return one.is_out(buffer_set(one.buffer_set())) || one.is_elsewhere_borrowed(inputs);
  };
  if (!std::all_of(all.begin(), all.end(), is_hindered)) return all.front();
  size_t number = all.size();
  if (number == kMaxCapturedGraphs) {
    number = all.back().buffer_set();
    all.pop_back();
  }
  return all.emplace_front(*shape.plan, number);
}

std::vector<at::Tensor> StreamContext::run_graphed(
    const std::vector<at::Tensor>& given, const GraphLimits& limits, GraphCounts& counts) {
  std::vector<at::Tensor> outside;
  if (limits.reuse_outputs && fixed_) outside = outside_fixed(given);
  const auto& inputs = outside.empty() ? given : outside;
  auto& shape = *plans_.front().second;
  if (shape.pace == Shape::Pace::kUnknown && shape.calls == 0) {
    if (keeps_much(*shape.plan, limits)) {
      shape.plan = shape.plan->planned_again(inputs, kApart);
    } else {
      shape.pace = Shape::Pace::kLaunching;
    }
  }
  if (shape.pace != Shape::Pace::kLaunching) return run_large(shape, inputs, counts);
  arenas_.first().reserve(shape.plan->arena_bytes());
  if (!fixed_) fixed_ = std::make_unique<Arena>(place_.device.type());
  auto& captured_graph = captured_graph_for(shape, inputs);
  const GraphMemory memory{*fixed_, buffer_set(captured_graph.buffer_set())};
  const bool due = captured_graph.wants_capture(inputs, limits, counts) && !memory.borrowed.is_out();
  if (due) make_room_for_a_graph(limits.max_graphs);
  if (captured_graph.has_graph() || (due && captured_graph.capture(inputs, memory, limits, counts))) {
    if (auto outputs = captured_graph.replay(inputs, memory, counts)) return std::move(*outputs);
  }
  // Lent all the same, from where a graph is going to: what reads it finds it there at the next call, and the memory
  // is not taken twice.
  const size_t lent = memory.borrowed.is_out() ? 0 : shape.plan->lay_out_lent(limits.borrowed);
  if (lent == 0) return shape.plan->run(inputs);
  memory.borrowed.reserve(lent);
  return shape.plan->run_lending(inputs, memory.borrowed.lend());
}

}  // namespace blade

// SPDX-License-Identifier: Apache-2.0
// An accelerator whose memory is the CPU's and whose streams do everything at once: it shows what the executor
// asks of a device. Its kernels are named in their binaries; graphs record their launches.
#include <c10/util/Exception.h>

#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "device/accelerator.h"

namespace {

using blade::Grid;
using blade::Stream;

struct Counts {
  int64_t launches, copies, bytes_copied, graphs, graph_launches, kernels, moves, told;
};

Counts counts{};
Stream current = nullptr;
std::string architecture_name = "fake_1";
size_t shared_bytes = 1000;
double seconds_per_launch = 1;
bool others_capture = false, busy = false, records_copies = true, moves_launches = true;
std::vector<std::function<void()>>* recording = nullptr;

using Values = std::vector<int64_t>;
std::shared_ptr<Values> last_launch;  // that was recorded: its arguments

using Body = void (*)(const Grid& grid, void** args);

template <typename T>
T arg(void** args, int i) {
  return *static_cast<T*>(args[i]);
}

// y = -x, n
void neg(const Grid&, void** args) {
  auto *x = arg<float*>(args, 0), *y = arg<float*>(args, 1);
  for (int64_t i = 0; i < arg<int64_t>(args, 2); ++i) y[i] = -x[i];
}

// z = x + y, n
void add(const Grid&, void** args) {
  auto *x = arg<float*>(args, 0), *y = arg<float*>(args, 1), *z = arg<float*>(args, 2);
  for (int64_t i = 0; i < arg<int64_t>(args, 3); ++i) z[i] = x[i] + y[i];
}

// y[i] = -x[i] for i in the grid, counted by k
void pack(const Grid& grid, void** args) {
  auto *x = arg<float*>(args, 0), *y = arg<float*>(args, 1);
  for (uint32_t i = 0; i < grid.x; ++i) y[i] = -x[i] * static_cast<float>(arg<int64_t>(args, 2));
}

// the same, and others come to wait for it
void slow_pack(const Grid& grid, void** args) {
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  pack(grid, args);
}

void fail(const Grid&, void**) { TORCH_CHECK(false, "the fake device fell over"); }

void fail_in_capture(const Grid& grid, void** args) {
  TORCH_CHECK(recording == nullptr, "not permitted while capturing");
  neg(grid, args);
}

struct Known {
  const char* name;
  Body body;
  int args;
};

constexpr Known kKnown[] = {
    {"neg", neg, 3},   {"add", add, 4},   {"pack", pack, 3}, {"slow_pack", slow_pack, 3}, {"pack_0123456789ab", pack, 3},
    {"fail", fail, 3}, {"fail_in_capture", fail_in_capture, 3}};

class FakeKernel final : public blade::Kernel {
 public:
  explicit FakeKernel(const blade::Binary& binary) {
    const std::string name(binary.bytes, binary.bytes + binary.size);
    for (const auto& known : kKnown) {
      if (name == known.name) known_ = &known;
    }
    TORCH_CHECK(known_ != nullptr, "the fake device has no kernel ", name);
    ++counts.kernels;
  }
  ~FakeKernel() override { --counts.kernels; }

  void launch(const Grid& grid, void** params, Stream stream) const override {
    TORCH_CHECK(stream == (recording ? &recording : current), "launched on a stream that is not the current one");
    TORCH_CHECK(*static_cast<void**>(params[known_->args]) == nullptr, "scratch memory is not null");
    ++counts.launches;
    if (recording == nullptr || known_->body == fail || known_->body == fail_in_capture) return known_->body(grid, params);
    last_launch = std::make_shared<Values>();
    for (int i = 0; i < known_->args; ++i) last_launch->push_back(*static_cast<int64_t*>(params[i]));
    recording->push_back([grid, values = last_launch, body = known_->body] {
      std::vector<void*> args;
      for (auto& value : *values) args.push_back(&value);
      body(grid, args.data());
    });
  }

 private:
  const Known* known_ = nullptr;
};

class FakeEvent final : public blade::Event {
 public:
  void record(Stream) override { at_ = counts.launches; }
  void block(Stream) const override {}
  double seconds_since(const blade::Event& earlier) const override {
    return seconds_per_launch * static_cast<double>(at_ - static_cast<const FakeEvent&>(earlier).at_);
  }

 private:
  int64_t at_ = 0;
};

using Copies = std::vector<blade::Copy>;

void copy_all(const Copies& copies) {
  ++counts.copies;
  for (const auto& one : copies) {
    std::memcpy(one.to, one.from, one.bytes);
    counts.bytes_copied += static_cast<int64_t>(one.bytes);
  }
}

class FakeRecorder final : public blade::Recorder {
 public:
  Stream stream() const override { return &recording; }
  void launch(const blade::Kernel& kernel, const Grid& grid, void** params) override {
    auto* before = std::exchange(recording, &work);
    kernel.launch(grid, params, stream());
    recording = before;
  }
  bool copy(const Copies& given) override {
    if (!records_copies) return false;
    auto own = std::make_shared<Copies>(given);
    copies.push_back(own);
    work.push_back([own] { copy_all(*own); });
    return true;
  }
  void keep_launch() override { launches.push_back(last_launch); }
  std::vector<std::function<void()>> work;
  std::vector<std::shared_ptr<Copies>> copies;
  std::vector<std::shared_ptr<Values>> launches;
};

class FakeGraph final : public blade::Graph {
 public:
  explicit FakeGraph(FakeRecorder recorder)
      : work_(std::move(recorder.work)), copies_(std::move(recorder.copies)), launches_(std::move(recorder.launches)) {
    ++counts.graphs;
  }
  ~FakeGraph() override { --counts.graphs; }
  void set_copies(size_t k, const Copies& copies) override {
    TORCH_CHECK(copies.size() == copies_.at(k)->size());
    *copies_[k] = copies;
  }
  void set_launch(size_t k, void** params) override {
    TORCH_CHECK(moves_launches, "the fake device keeps its launches as they are");
    ++counts.moves;
    auto& values = *launches_.at(k);
    for (size_t i = 0; i < values.size(); ++i) values[i] = *static_cast<int64_t*>(params[i]);
  }
  void launch(Stream stream) override {
    TORCH_CHECK(stream == current);
    ++counts.graph_launches;
    for (auto& one : work_) one();
  }

 private:
  std::vector<std::function<void()>> work_;
  std::vector<std::shared_ptr<Copies>> copies_;
  std::vector<std::shared_ptr<Values>> launches_;
};

class Fake final : public blade::Accelerator {
 public:
  c10::DeviceType type() const override { return c10::kCPU; }
  c10::DeviceIndex count() const override { return 1; }
  std::string architecture(c10::DeviceIndex) const override { return architecture_name; }
  size_t shared_memory(c10::DeviceIndex) const override { return shared_bytes; }
  void enter(c10::DeviceIndex) override {}
  Stream current_stream(c10::DeviceIndex) const override { return current; }
  bool is_capturing(Stream) const override { return others_capture; }
  std::unique_ptr<blade::Kernel> load(const blade::Binary& binary) override { return std::make_unique<FakeKernel>(binary); }
  std::unique_ptr<blade::Event> make_event() override { return std::make_unique<FakeEvent>(); }
  void synchronize(Stream) override {}
  void zero(void* data, size_t bytes, Stream) override { std::memset(data, 0, bytes); }

  void copy(const Copies& copies, Stream) override { copy_all(copies); }

  std::unique_ptr<blade::Graph> record(
      c10::DeviceIndex, Stream, blade::Work kind, const std::function<void(blade::Recorder&)>& work) override {
    if (busy) return nullptr;
    FakeRecorder recorder;
    const bool all_is_told = kind == blade::Work::kLaunches;
    if (all_is_told) ++counts.told;
    recording = all_is_told ? nullptr : &recorder.work;
    try {
      work(recorder);
    } catch (...) {
      recording = nullptr;
      throw;
    }
    recording = nullptr;
    return std::make_unique<FakeGraph>(std::move(recorder));
  }
};

}  // namespace

extern "C" {
void* fake_accelerator() {
  static auto* fake = new Fake();
  return static_cast<blade::Accelerator*>(fake);
}
int64_t fake_abi() { return blade::kAcceleratorAbi; }
Counts* fake_counts() { return &counts; }
void fake_stream(int64_t stream) { current = reinterpret_cast<Stream>(stream); }
void fake_capturing(bool capturing) { others_capture = capturing; }
void fake_is(const char* name, int64_t shared) {
  architecture_name = name;
  shared_bytes = static_cast<size_t>(shared);
}
void fake_takes(double seconds) { seconds_per_launch = seconds; }
bool fake_is_recording() { return recording != nullptr; }
// y = -x, enqueued by an op
void fake_neg(const float* x, float* y, int64_t n) {
  const auto work = [x, y, n] {
    for (int64_t i = 0; i < n; ++i) y[i] = -x[i];
  };
  recording == nullptr ? work() : recording->push_back(work);
}
void fake_busy(bool is_busy) { busy = is_busy; }
void fake_records_copies(bool does) { records_copies = does; }
void fake_moves_launches(bool does) { moves_launches = does; }
}

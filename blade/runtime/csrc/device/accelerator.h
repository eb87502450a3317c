// SPDX-License-Identifier: Apache-2.0
// What the executor asks of a device that is not the CPU. This library knows none: a second one brings
// it (`libblade_cuda.so`) and registers it through the op blade::register_accelerator.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace blade {

// Changes with every change of what this file declares: both libraries must have been built together.
constexpr int64_t kAcceleratorAbi = 6;

using Stream = void*;  // the driver's handle; null is the default stream

struct Grid {
  uint32_t x = 0, y = 0, z = 0;
};

// One function of device code as the engine carries it.
struct Binary {
  std::string architecture, name;
  uint32_t threads = 0, shared = 0;  // per block: threads, bytes of dynamic shared memory
  bool early = false;  // it may start while what was launched before it ends: it waits for that itself
  const uint8_t* bytes = nullptr;
  size_t size = 0;
};

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
};

// Everything below throws c10::Error with the driver's text where a call of the driver fails.

// A function loaded on one device. Freed on destruction.
class Kernel {
 public:
  virtual ~Kernel() = default;
  // `params` has the address of every argument.
  virtual void launch(const Grid& grid, void** params, Stream stream) const = 0;
};

// A point in the work of a stream.
class Event {
 public:
  virtual ~Event() = default;
  virtual void record(Stream stream) = 0;
  virtual void block(Stream stream) const = 0;  // what is enqueued there from now on comes after
  virtual double seconds_since(const Event& earlier) const = 0;  // waits until both are reached
};

// Work as it is being recorded.
class Recorder {
 public:
  virtual ~Recorder() = default;
  virtual Stream stream() const = 0;  // what is enqueued there is recorded, except where all is told to the recorder
  virtual void launch(const Kernel& kernel, const Grid& grid, void** params) = 0;
  // Records copies whose addresses may be others at every launch: those given here do not matter, their number and
  // sizes do. They do not overlap. False: this device cannot, and nothing was recorded.
  virtual bool copy(const std::vector<Copy>& copies) = 0;
  // What was recorded last, a launch of a Kernel, may be given other arguments.
  virtual void keep_launch() = 0;
};

// Recorded work that is enqueued as a whole.
class Graph {
 public:
  virtual ~Graph() = default;
  virtual void set_copies(size_t k, const std::vector<Copy>& copies) = 0;  // the k-th that were recorded
  virtual void set_launch(size_t k, void** params) = 0;  // all arguments of the k-th that was kept
  virtual void launch(Stream stream) = 0;
};

// What is recorded.
enum class Work {
  kLaunches,  // what the recorder is told, and nothing else: no thread is kept from anything meanwhile
  kCalls,     // what is enqueued on its stream, too
  kDraws,     // that, and some of it draws from torch's default generator: every launch draws other numbers
};

class Accelerator {
 public:
  virtual ~Accelerator() = default;
  virtual c10::DeviceType type() const = 0;
  virtual c10::DeviceIndex count() const = 0;                                      // 0: none usable
  virtual std::string architecture(c10::DeviceIndex device) const = 0;             // "sm_90"
  virtual size_t shared_memory(c10::DeviceIndex device) const = 0;                 // bytes that a block may have
  virtual void enter(c10::DeviceIndex device) = 0;  // this thread is going to use it; it is the current one already
  virtual Stream current_stream(c10::DeviceIndex device) const = 0;
  virtual bool is_capturing(Stream stream) const = 0;  // somebody records what is enqueued there
  virtual std::unique_ptr<Kernel> load(const Binary& binary) = 0;  // on the current device
  virtual std::unique_ptr<Event> make_event() = 0;
  virtual void synchronize(Stream stream) = 0;
  virtual void zero(void* data, size_t bytes, Stream stream) = 0;
  virtual void copy(const std::vector<Copy>& copies, Stream stream) = 0;  // they do not overlap

  // Records what `work` enqueues, to be launched on `stream`; memory that it takes meanwhile belongs to a
  // pool for all graphs of that stream. nullptr: not now, another thread is recording.
  // Whatever goes wrong, nothing is being recorded afterwards.
  virtual std::unique_ptr<Graph> record(
      c10::DeviceIndex device, Stream stream, Work kind, const std::function<void(Recorder&)>& work) = 0;
};

constexpr const char* kCuda = "cuda";

// The one whose programs begin with `isa NAME`, or nullptr. It is never destroyed.
Accelerator* find_accelerator(const std::string& name);
void register_accelerator(const std::string& name, int64_t abi, Accelerator* accelerator);
std::vector<std::string> accelerator_names();

// The index of a container of device code ("blade.cubins 1"); the bytes stay where they are. Throws Unavailable.
std::vector<Binary> read_binaries(const uint8_t* bytes, size_t size);

}  // namespace blade

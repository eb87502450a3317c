// SPDX-License-Identifier: Apache-2.0
#include "execute/workers.h"

#include <ATen/Parallel.h>
#include <omp.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <fstream>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>

namespace blade {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kLinger = std::chrono::microseconds(50);   // a worker spins so long for the next kernel
constexpr auto kPatience = std::chrono::microseconds(20);  // a caller spins so long for parts that workers have begun
constexpr size_t kSlots = 16;                              // callers that have helpers at the same time
constexpr int64_t kMostParts = 1 << 12;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until `ready`, for `most` at most; whether it is.
template <typename Ready>
bool spin(std::chrono::microseconds most, const Ready& ready) {
  if (ready()) return true;
  const auto end = Clock::now() + most;
  do {
    for (int i = 0; i < 16; ++i) {
      pause();
      if (ready()) return true;
    }
  } while (Clock::now() < end);
  return false;
}

// A kernel that is being split. A ticket holds the number of the kernel, its parts, and the next part to take:
// who takes a part by exchanging the ticket knows that the kernel stays until that part is done.
class SplitKernel {
 public:
  bool reserve() { return !reserved_.exchange(true, std::memory_order_acquire); }

  void publish(int64_t extent, int64_t parts, Part part) {
    part_.emplace(part);
    extent_ = extent;
    size_ = (extent + parts - 1) / parts;
    parts = (extent + size_ - 1) / size_;
    parts_ = parts;
    done_.store(0, std::memory_order_relaxed);
    error_ = nullptr;
    const uint64_t number = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
    ticket_.store(number << 32 | static_cast<uint64_t>(parts) << 16);
  }

  bool has_part() const { return left(ticket_.load()); }

  // Takes a part and runs it; false if none was left.
  bool help() {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    do {
      if (!left(ticket)) return false;
    } while (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel));
    const int64_t begin = static_cast<int64_t>(ticket & 0xffff) * size_;
    try {
      (*part_)(begin, std::min(begin + size_, extent_));
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex_);
      error_ = std::current_exception();
    }
    const int64_t parts = parts_;  // once all parts are done, the slot may be another kernel's
    if (done_.fetch_add(1) + 1 == parts && is_awaited_.load()) {
      const std::lock_guard<std::mutex> lock(mutex_);
      finished_.notify_one();
    }
    return true;
  }

  // Returns when all parts are done. A caller that waits for long sleeps: a worker without a core gets this one.
  void finish() {
    const auto ready = [this] { return done_.load() == parts_; };
    if (!spin(kPatience, ready)) {
      std::unique_lock<std::mutex> lock(mutex_);
      is_awaited_.store(true);
      finished_.wait(lock, ready);
      is_awaited_.store(false);
    }
    const auto error = error_;
    reserved_.store(false, std::memory_order_release);
    if (error) std::rethrow_exception(error);
  }

 private:
  static bool left(uint64_t ticket) { return (ticket & 0xffff) < (ticket >> 16 & 0xffff); }

  std::atomic<bool> reserved_{false};
  std::atomic<uint64_t> ticket_{0};
  std::atomic<int64_t> done_{0};
  std::atomic<bool> is_awaited_{false};
  std::optional<Part> part_;
  int64_t extent_ = 0, size_ = 1, parts_ = 0;
  std::exception_ptr error_;
  std::mutex mutex_;
  std::condition_variable finished_;
};

class Workers {
 public:
  void run(int64_t extent, int64_t parts, Part part) {
    start(parts - 1);
    SplitKernel* slot = nullptr;
    for (auto& one : slots_) {
      if (!one.reserve()) continue;
      slot = &one;
      break;
    }
    if (slot == nullptr) return part(0, extent);
    slot->publish(extent, parts, part);
    wake(parts - 1);
    while (slot->help()) {
    }
    slot->finish();
  }

 private:
  void start(int64_t count) {
    if (started_.load(std::memory_order_relaxed) >= count) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    try {
      while (started_.load() < count) {
        std::thread([this] { work(); }).detach();
        started_.fetch_add(1);
      }
    } catch (const std::system_error&) {
      // no more threads: those that there are have to do
    }
  }

  void wake(int64_t count) {
    if (asleep_.load() == 0) return;
    { const std::lock_guard<std::mutex> lock(mutex_); }  // who counts as asleep waits
    for (int64_t i = 0; i < count; ++i) woken_.notify_one();
  }

  [[noreturn]] void work() {
    const auto found = [this] { return std::any_of(slots_.begin(), slots_.end(), [](const SplitKernel& s) { return s.has_part(); }); };
    for (;;) {
      for (auto& slot : slots_) {
        while (slot.help()) {
        }
      }
      if (spin(kLinger, found)) continue;
      std::unique_lock<std::mutex> lock(mutex_);
      asleep_.fetch_add(1);
      woken_.wait(lock, found);
      asleep_.fetch_sub(1);
    }
  }

  std::array<SplitKernel, kSlots> slots_;
  std::atomic<int64_t> started_{0}, asleep_{0};
  std::mutex mutex_;
  std::condition_variable woken_;
};

// Never destroyed: workers run until the process ends. A forked process has none of them and makes a pool of its own.
std::atomic<Workers*> pool{nullptr};
std::atomic<int64_t> at_work{0};
thread_local bool openmp_here = false;
thread_local int64_t threads_here = 0;  // for the kernels of this call; 0: no call

// Calls have so many threads less until then (ns of the steady clock), because the last ones lost their core.
std::atomic<int64_t> fewer{0}, fewer_until{0}, fewer_ns{0};
constexpr int64_t kLost = 300'000;                            // ns a call may lose
constexpr int64_t kLeastPause = 5'000'000, kMostPause = 160'000'000;  // ns
constexpr int64_t kCallsPerTrial = 8;  // a pause is as long as so many calls like the one that lost its core

int64_t now_ns(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

[[maybe_unused]] const bool prepared = pthread_atfork(nullptr, nullptr, [] {
                                         pool.store(nullptr);
                                         at_work.store(threads_here > 0 ? 1 : 0);
                                       }) == 0;

Workers& workers() {
  Workers* found = pool.load(std::memory_order_acquire);
  if (found != nullptr) return *found;
  static std::mutex* mutex = new std::mutex;  // a fork while it is held is one during the first parallel call
  const std::lock_guard<std::mutex> lock(*mutex);
  found = pool.load();
  if (found == nullptr) pool.store(found = new Workers);
  return *found;
}

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// "max 100000", "150000 100000": microseconds per period.
int64_t quota_in(const std::string& text) {
  try {
    size_t used = 0;
    const int64_t quota = std::stoll(text, &used);
    const int64_t period = std::stoll(text.substr(used));
    return quota > 0 && period > 0 ? std::max<int64_t>(1, (quota + period - 1) / period) : 0;
  } catch (const std::exception&) {
    return 0;
  }
}

int64_t number_of_threads() {
  static const int64_t quota = cpu_quota("");
  const int64_t threads = at::get_num_threads();
  return quota > 0 ? std::min(threads, quota) : threads;
}

// How often the scheduler took the core from this thread.
int64_t interruptions() {
  rusage found{};
  getrusage(RUSAGE_THREAD, &found);
  return found.ru_nivcsw;
}

// libgomp keeps a team per thread that has a parallel region. The team of the main thread spins between regions; with
// a second team there are more threads than cores, and all of them sleep.
bool is_main_thread() {
  thread_local const bool is_main = syscall(SYS_gettid) == getpid();
  return is_main;
}

}  // namespace

AtWork::AtWork(bool shares_openmp) {
  openmp_here = shares_openmp || is_main_thread();
  const int64_t callers = at_work.fetch_add(1, std::memory_order_relaxed) + 1;
  all_ = threads_here = std::max<int64_t>(1, number_of_threads() / callers);
  if (all_ == 1) return;
  wall_ = now_ns(CLOCK_MONOTONIC);
  if (wall_ < fewer_until.load(std::memory_order_relaxed)) {
    threads_here = std::max<int64_t>(1, all_ - fewer.load(std::memory_order_relaxed));
    if (openmp_here) {  // for ops of torch
      openmp_threads_ = omp_get_max_threads();
      omp_set_num_threads(static_cast<int>(threads_here));
    }
  }
  cpu_ = now_ns(CLOCK_THREAD_CPUTIME_ID);
  if (openmp_here) interruptions_ = interruptions();
}

AtWork::~AtWork() {
  at_work.fetch_sub(1, std::memory_order_relaxed);
  const bool has_all = threads_here == all_, is_alone = threads_here == 1;
  threads_here = 0;
  if (openmp_threads_ > 0) omp_set_num_threads(openmp_threads_);
  if (is_alone) return;
  const int64_t wall = now_ns(CLOCK_MONOTONIC), spent = wall - wall_;
  const int64_t lost = spent - (now_ns(CLOCK_THREAD_CPUTIME_ID) - cpu_);
  // a thread of OpenMP also sleeps for others that are slow
  const bool is_disturbed = lost >= kLost && lost >= spent / 4 && (!openmp_here || interruptions() > interruptions_);
  const int64_t before = fewer.load(std::memory_order_relaxed);
  if (!has_all) {
    if (is_disturbed) fewer.store(std::min(all_ - 1, 2 * before), std::memory_order_relaxed);
    return;
  }
  if (!is_disturbed) {
    fewer.store(0, std::memory_order_relaxed);
    fewer_ns.store(0, std::memory_order_relaxed);
    return;
  }
  const int64_t least = std::max(kLeastPause, spent), most = std::max(kMostPause, kCallsPerTrial * spent);
  const int64_t pause = std::clamp(2 * fewer_ns.load(std::memory_order_relaxed), least, most);
  fewer.store(std::clamp<int64_t>(before, 1, all_ - 1), std::memory_order_relaxed);
  fewer_ns.store(pause, std::memory_order_relaxed);
  fewer_until.store(wall + pause, std::memory_order_relaxed);
}

void split(int64_t extent, int64_t grain, Part part) {
  if (extent <= 0) return;
  const int64_t parts = std::min({threads_here, (extent + grain - 1) / grain, kMostParts});
  if (parts <= 1 || at::in_parallel_region()) return part(0, extent);
  if (openmp_here) {
    at::parallel_for(0, extent, (extent + parts - 1) / parts, part);
  } else {
    workers().run(extent, parts, part);
  }
}

int64_t cpu_quota(const std::string& root) {
  // Version 2: the limits of the own group and of those above it; in a container its own group is the root.
  std::ifstream groups(root + "/proc/self/cgroup");
  int64_t least = 0;
  const auto add = [&least](int64_t found) {
    if (found > 0) least = least == 0 ? found : std::min(least, found);
  };
  for (std::string line; std::getline(groups, line);) {
    const size_t at = line.find("::");
    if (at == std::string::npos) continue;
    for (std::string group = line.substr(at + 2); !group.empty(); group.resize(group.find_last_of('/'))) {
      add(quota_in(first_line(root + "/sys/fs/cgroup" + (group == "/" ? "" : group) + "/cpu.max")));
    }
  }
  add(quota_in(first_line(root + "/sys/fs/cgroup/cpu.max")));
  const std::string old = root + "/sys/fs/cgroup/cpu/cpu.cfs_";  // version 1
  add(quota_in(first_line(old + "quota_us") + " " + first_line(old + "period_us")));
  return least;
}

}  // namespace blade

// SPDX-License-Identifier: Apache-2.0
// Threads that help a kernel where a core is free for them.
//
// A kernel is cut into one part per thread. The caller takes parts until none is left, and a worker takes one when it
// gets a core: nobody waits for a thread that has not begun. So a core that another library's threads hold costs the
// help of one worker and nothing else, where OpenMP's barrier would wait for the scheduler. Workers spin for some
// microseconds between the kernels of a call, then sleep. A call that did not get its core, because a worker that it
// woke or another process had it, is followed by calls with fewer threads, for some milliseconds and longer each time.
//
// Kernels of calls in the main thread are split by OpenMP: its team spins between kernels. Beside a busy process that
// has the core of one of them, each barrier takes a slice of the scheduler's, and a call of BERT-base's layers on two
// cores four times as long as alone; these calls have fewer threads, too. Another thread would get a
// team of its own, and with more threads than cores all of libgomp's sleep at each barrier: a call of BERT-mini at 1x16
// took 1.5 ms there, 0.56 in the main thread and with the workers.
//
// The number of threads is torch's (torch.set_num_threads, OMP_NUM_THREADS), at most what the CPU quota of the control
// group allows, shared by the callers that are at work: each of many callers runs its kernels alone, and starts no
// team of its own.
#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <string>

namespace blade {

using Part = c10::function_ref<void(int64_t begin, int64_t end)>;

// Calls `part` for all of 0..extent, in parts of at least `grain`. Within a parallel region of OpenMP, in one.
void split(int64_t extent, int64_t grain, Part part);

// This thread is at work in an engine; calls of `split` in between have the helpers that were free at its beginning.
class AtWork {
 public:
  // `shares_openmp`: the program calls ops of torch that compute; kernels use their team of OpenMP, whose threads wait on
  // the cores.
  explicit AtWork(bool shares_openmp);
  AtWork(const AtWork&) = delete;
  AtWork& operator=(const AtWork&) = delete;
  ~AtWork();

 private:
  int64_t all_ = 1;             // threads, on a quiet machine
  int64_t wall_ = 0, cpu_ = 0;  // ns, where threads help
  int64_t interruptions_ = 0;
  int openmp_threads_ = 0;  // of this thread outside the call, if there are others inside
};

// CPUs that the control group's quota allows, rounded up; 0 without a quota. `root` is "" except in tests.
int64_t cpu_quota(const std::string& root);

}  // namespace blade

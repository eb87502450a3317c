// SPDX-License-Identifier: Apache-2.0
#include "copy.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <string>

#include "driver.h"
#include "node.h"
#include "relaxed.h"

namespace blade::cuda {
namespace {

constexpr unsigned kThreads = 256, kMostBlocks = 1024;
constexpr size_t kVector = 16;  // bytes a thread copies at a time

// A kernel has a table of copies as its parameter: a small one for the usual case, and the largest that fits 4 KiB.
constexpr size_t kFew = 8, kMany = 128;
static_assert(sizeof(Copy) == 24, "the kernel reads entries of 24 bytes");

// Block (x, y) does its part of copy y: by 16 bytes where both addresses allow it, else by 4, and the rest by 1.
constexpr const char* kBody = R"({
  .reg .pred %p<3>;
  .reg .b32 %r<8>;
  .reg .b64 %to, %from, %size, %both, %k, %step, %at, %count, %end, %d<4>;
  mov.b64 %d0, table;
  mov.u32 %r0, %ctaid.y;
  mul.wide.u32 %d1, %r0, 24;
  add.s64 %d0, %d0, %d1;
  ld.param.u64 %to, [%d0];
  ld.param.u64 %from, [%d0+8];
  ld.param.u64 %size, [%d0+16];
  cvta.to.global.u64 %to, %to;
  cvta.to.global.u64 %from, %from;
  mov.u32 %r0, %ctaid.x;
  mov.u32 %r1, %ntid.x;
  mov.u32 %r2, %tid.x;
  mad.lo.u32 %r2, %r0, %r1, %r2;
  cvt.u64.u32 %at, %r2;
  mov.u32 %r0, %nctaid.x;
  mul.lo.u32 %r0, %r0, %r1;
  cvt.u64.u32 %step, %r0;
  mov.u64 %end, 0;
  or.b64 %both, %to, %from;
  and.b64 %k, %both, 15;
  setp.ne.u64 %p0, %k, 0;
  @%p0 bra by_words;
  shr.u64 %count, %size, 4;
  and.b64 %end, %size, -16;
  mov.u64 %k, %at;
vectors:
  setp.ge.u64 %p1, %k, %count;
  @%p1 bra rest;
  shl.b64 %d1, %k, 4;
  add.s64 %d2, %from, %d1;
  add.s64 %d3, %to, %d1;
  ld.global.v4.u32 {%r4, %r5, %r6, %r7}, [%d2];
  st.global.v4.u32 [%d3], {%r4, %r5, %r6, %r7};
  add.s64 %k, %k, %step;
  bra vectors;
by_words:
  and.b64 %k, %both, 3;
  setp.ne.u64 %p0, %k, 0;
  @%p0 bra rest;
  shr.u64 %count, %size, 2;
  and.b64 %end, %size, -4;
  mov.u64 %k, %at;
words:
  setp.ge.u64 %p1, %k, %count;
  @%p1 bra rest;
  shl.b64 %d1, %k, 2;
  add.s64 %d2, %from, %d1;
  add.s64 %d3, %to, %d1;
  ld.global.u32 %r4, [%d2];
  st.global.u32 [%d3], %r4;
  add.s64 %k, %k, %step;
  bra words;
rest:
  add.s64 %k, %end, %at;
bytes:
  setp.ge.u64 %p2, %k, %size;
  @%p2 bra done;
  add.s64 %d2, %from, %k;
  add.s64 %d3, %to, %k;
  ld.global.u8 %r4, [%d2];
  st.global.u8 [%d3], %r4;
  add.s64 %k, %k, %step;
  bra bytes;
done:
  ret;
}
)";

std::string kernel_text(const std::string& name, size_t capacity) {
  const auto bytes = std::to_string(capacity * sizeof(Copy));
  return ".visible .entry " + name + "(.param .align 8 .b8 table[" + bytes + "])\n" + kBody;
}

struct CopyKernels {
  CUfunction few = nullptr, many = nullptr;
};

// The driver compiles the text, which may be impossible (a container without the driver's compiler).
CopyKernels load_kernels() {
  const auto& cu = driver();
  const Relaxed relaxed;
  const auto text = ".version 7.0\n.target sm_75\n.address_size 64\n" + kernel_text("few", kFew) + kernel_text("many", kMany);
  CUmodule module = nullptr;  // stays loaded as long as its context
  CopyKernels kernels;
  if (cu.cuModuleLoadData(&module, text.c_str()) != CUDA_SUCCESS) return kernels;
  if (cu.cuModuleGetFunction(&kernels.few, module, "few") != CUDA_SUCCESS ||
      cu.cuModuleGetFunction(&kernels.many, module, "many") != CUDA_SUCCESS) {
    return {};
  }
  return kernels;
}

const CopyKernels& kernels_here() {
  static std::mutex mutex;
  static auto* loaded = new std::map<CUcontext, CopyKernels>();
  CUcontext context = nullptr;
  check(driver().cuCtxGetCurrent(&context), "asking for the context");
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = loaded->find(context);
  return found != loaded->end() ? found->second : loaded->emplace(context, load_kernels()).first->second;
}

}  // namespace

CopyLaunch::CopyLaunch(CUfunction kernel, size_t capacity, size_t first, const std::vector<Copy>& copies)
    : kernel_(kernel), first_(first), count_(std::min(capacity, copies.size() - first)), table_(capacity, Copy{}) {
  size_t most = 0;
  for (size_t k = 0; k < count_; ++k) most = std::max(most, copies[first + k].bytes);
  const size_t blocks = (most / kVector + kThreads - 1) / kThreads;
  blocks_ = static_cast<unsigned>(std::clamp<size_t>(blocks, 1, kMostBlocks));
  set(copies);
}

bool CopyLaunch::set(const std::vector<Copy>& copies) {
  bool changed = false;
  for (size_t k = 0; k < count_; ++k) {
    const Copy& one = copies[first_ + k];
    changed = changed || table_[k].to != one.to || table_[k].from != one.from;
    table_[k] = one;
  }
  return changed;
}

void CopyLaunch::launch(CUstream stream) {
  CUlaunchConfig config{};
  config.gridDimX = blocks_;
  config.gridDimY = static_cast<unsigned>(count_);
  config.gridDimZ = 1;
  config.blockDimX = kThreads;
  config.blockDimY = config.blockDimZ = 1;
  config.hStream = stream;
  void* params[] = {table_.data()};
  check(driver().cuLaunchKernelEx(&config, kernel_, params, nullptr), "copying");
}

void CopyLaunch::set_node(CUgraphExec exec, CUgraphNode of) {
  params_[0] = table_.data();
  const auto node = node_of<CUDA_KERNEL_NODE_PARAMS>(kernel_, grid(), kThreads, 0, params_);
  check(driver().cuGraphExecKernelNodeSetParams(exec, of, &node), "changing what a graph copies");
}

CUDA_KERNEL_NODE_PARAMS_v3 CopyLaunch::node() {
  params_[0] = table_.data();
  return node_of<CUDA_KERNEL_NODE_PARAMS_v3>(kernel_, grid(), kThreads, 0, params_);
}

std::optional<std::vector<CopyLaunch>> launches_of(const std::vector<Copy>& copies) {
  const auto& kernels = kernels_here();
  if (kernels.few == nullptr) return std::nullopt;
  const bool few = copies.size() <= kFew;
  const size_t capacity = few ? kFew : kMany;
  std::vector<CopyLaunch> launches;
  for (size_t first = 0; first < copies.size(); first += capacity) {
    launches.emplace_back(few ? kernels.few : kernels.many, capacity, first, copies);
  }
  return launches;
}

void copy_all(const std::vector<Copy>& copies, CUstream stream) {
  if (auto launches = launches_of(copies)) {
    for (auto& one : *launches) one.launch(stream);
    return;
  }
  for (const auto& one : copies) {
    if (one.bytes == 0) continue;
    const auto to = reinterpret_cast<CUdeviceptr>(one.to), from = reinterpret_cast<CUdeviceptr>(one.from);
    check(driver().cuMemcpyDtoDAsync(to, from, one.bytes, stream), "copying");
  }
}

}  // namespace blade::cuda

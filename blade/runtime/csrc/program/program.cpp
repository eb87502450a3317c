// SPDX-License-Identifier: Apache-2.0
#include "program/program.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cmath>

namespace blade {
namespace {

// Wrapping arithmetic: a program computes sizes, and what overflows is caught by their use.
int64_t wrap(uint64_t value) { return static_cast<int64_t>(value); }

int64_t floor_div(int64_t a, int64_t b) {
  if (b == 0) return 0;
  if (b == -1) return wrap(-static_cast<uint64_t>(a));
  return a / b - ((a % b != 0) && ((a < 0) != (b < 0)));
}

int64_t floor_mod(int64_t a, int64_t b) {
  if (b == 0 || b == -1) return 0;
  const int64_t rest = a % b;
  return rest != 0 && ((rest < 0) != (b < 0)) ? rest + b : rest;
}

int64_t apply(RegOp op, int64_t a, int64_t b) {
  const auto ua = static_cast<uint64_t>(a);
  const auto ub = static_cast<uint64_t>(b);
  switch (op) {
    case RegOp::kAdd: return wrap(ua + ub);
    case RegOp::kSub: return wrap(ua - ub);
    case RegOp::kMul: return wrap(ua * ub);
    case RegOp::kFloorDiv: return floor_div(a, b);
    case RegOp::kMod: return floor_mod(a, b);
    case RegOp::kMin: return a < b ? a : b;
    case RegOp::kMax: return a > b ? a : b;
    case RegOp::kEq: return a == b;
    case RegOp::kNe: return a != b;
    case RegOp::kLt: return a < b;
    case RegOp::kLe: return a <= b;
    case RegOp::kGt: return a > b;
    case RegOp::kGe: return a >= b;
    case RegOp::kAnd: return a != 0 && b != 0;
    case RegOp::kOr: return a != 0 || b != 0;
    default: return 0;
  }
}

// Of forward-mode differentiation; it has one level.
bool has_tangent(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->autograd_meta() != nullptr && tensor._fw_grad(/*level=*/0).defined();
}

// Autocast changes the dtypes of the original's ops, which an engine's are not.
bool is_autocast_on(const Program& program) {
  if (c10::impl::tls_local_dispatch_key_set().excluded_.has_all(c10::autocast_dispatch_keyset)) return false;  // anywhere
  if (program.inputs.empty()) return at::autocast::is_autocast_enabled(at::kCPU);
  at::DeviceType last = at::kMeta;
  for (const auto& spec : program.inputs) {
    if (spec.device == last) continue;
    last = spec.device;
    if (at::autocast::is_autocast_enabled(last)) return true;
  }
  return false;
}

// A size times a float, its fraction cut off; what no int64 holds is no size.
int64_t scale(int64_t a, double factor) {
  const double value = static_cast<double>(a) * factor;
  return value > -0x1p63 && value < 0x1p63 ? static_cast<int64_t>(value) : 0;
}

// Rounded down, in integers: the root of a double is off by one for large squares.
int64_t root(int64_t a) {
  if (a <= 0) return 0;
  auto found = static_cast<int64_t>(std::sqrt(static_cast<double>(a)));
  while (found > a / found) --found;
  while (found + 1 <= a / (found + 1)) ++found;
  return found;
}

}  // namespace

int64_t eval_register(const Reg& reg, const std::vector<int64_t>& values) {
  switch (reg.op) {
    case RegOp::kConst: return reg.a;
    case RegOp::kIndex: return 0;
    case RegOp::kRoot: return root(values[reg.a]);
    case RegOp::kScale: return scale(values[reg.a], reg.factor);
    default: return apply(reg.op, values[reg.a], values[reg.b]);
  }
}

void eval_registers(const Program& program, const std::vector<at::Tensor>& inputs, std::vector<int64_t>& values) {
  values.clear();
  values.reserve(program.regs.size());
  for (const auto& reg : program.regs) {
    const bool is_dim = reg.op == RegOp::kDim;
    values.push_back(is_dim ? inputs[reg.a].sizes()[reg.b] : reg.known_at > 0 ? 0 : eval_register(reg, values));
  }
}

void eval_stage(const Program& program, const Stage& stage, std::vector<int64_t>& values) {
  for (const int64_t id : stage.regs) values[id] = eval_register(program.regs[id], values);
}

const Guard* failed_guard(const Program& program, const std::vector<int64_t>& values) {
  for (const auto& guard : program.guards) {
    if (values[guard.reg] == 0 && program.regs[guard.reg].known_at == 0) return &guard;
  }
  return nullptr;
}

const Guard* failed_guard(const Program& program, const Stage& stage, const std::vector<int64_t>& values) {
  for (const int64_t k : stage.guards) {
    if (values[program.guards[k].reg] == 0) return &program.guards[k];
  }
  return nullptr;
}

std::optional<Code> check_inputs(const Program& program, const std::vector<at::Tensor>& inputs, bool takes_autocast) {
  if (inputs.size() != program.inputs.size()) return Code::kGuardRank;
  if (!takes_autocast && is_autocast_on(program)) return Code::kGuardAutocast;
  const bool grad = c10::GradMode::is_enabled();
  for (size_t i = 0; i < inputs.size(); ++i) {
    const auto& t = inputs[i];
    const auto& spec = program.inputs[i];
    if (!t.defined() || t.scalar_type() != spec.dtype) return Code::kGuardDtype;
    // a sparse tensor, or one that Python code or functorch stands for, has no memory to read
    const auto device = spec.number ? at::kCPU : spec.device;
    if (t.device().type() != device || t.layout() != at::kStrided || !t.has_storage() ||
        t.unsafeGetTensorImpl()->is_python_dispatch()) {
      return Code::kGuardDevice;
    }
    if (t.dim() != spec.rank) return Code::kGuardRank;
    if (grad && t.requires_grad()) return Code::kGuardGrad;
    if (has_tangent(t)) return Code::kGuardGrad;
  }
  return std::nullopt;
}

}  // namespace blade

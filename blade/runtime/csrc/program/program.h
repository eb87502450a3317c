// SPDX-License-Identifier: Apache-2.0
// The DISC program: the text that program/FORMAT.md describes, as data.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/reason.h"

namespace blade {

struct InputSpec {
  at::ScalarType dtype;
  at::DeviceType device;
  int64_t rank;
};

enum class RegOp : uint8_t {
  kDim, kConst, kAdd, kSub, kMul, kFloorDiv, kMod, kMin, kMax, kEq, kNe, kLt, kLe, kGt, kGe, kAnd, kOr,
  kScale
};

// kDim: input a, axis b. kConst: value a. kScale: register a times factor. Otherwise registers a and b.
struct Reg {
  RegOp op;
  int64_t a = 0;
  int64_t b = 0;
  double factor = 0;
};

struct Guard {
  int64_t reg;
  std::string text;
};

enum class SlotKind : uint8_t { kInput, kUpdate, kConst, kArena, kOutput, kDyn, kView };

struct Slot {
  SlotKind kind;
  int64_t index = 0;  // kInput, kUpdate, kConst: which; kView: the base slot
  int64_t root = 0;   // the slot whose memory this is: itself unless a view
  at::ScalarType dtype = at::ScalarType::Undefined;  // kArena, kOutput, kDyn
  std::vector<int64_t> sizes;    // registers
  std::vector<int64_t> strides;  // registers: kDyn, kView
  int64_t offset = -1;           // register: kView
  int64_t reuse = -1;            // kArena: the slot whose bytes it takes where they are as many, or -1
  bool as_tensor = false;        // a call reads it or the engine returns it: needs an at::Tensor
};

struct CallArg {
  enum Kind : uint8_t { kStatic, kSlot, kReg, kInts, kTensors, kOptionalTensors };
  Kind kind = kStatic;
  int64_t id = 0;                                 // kSlot, kReg
  bool written = false;                           // kSlot: the schema says the op writes it
  c10::IValue value;                              // kStatic
  std::vector<std::pair<bool, int64_t>> ints;     // kInts: (is a register, register or value)
  std::vector<int64_t> slots;                     // kTensors, kOptionalTensors: -1 is None
};

struct Instr {
  std::string text;  // its line
  int64_t when = -1;  // a register: runs only where that is not 0; -1: always
  // kernel, launch
  std::string kernel;  // empty: a call
  int64_t extent = 0, cost = 0, scratch = 0;  // registers
  bool launch = false;                        // of an accelerator's function, over a grid
  std::array<int64_t, 3> grid{};              // registers
  std::vector<int64_t> ptrs;                  // slots
  std::vector<int64_t> ints;                  // registers
  // call
  std::optional<c10::OperatorHandle> op;
  bool draws = false;  // random numbers, from torch's default generator
  std::vector<CallArg> args;
  std::vector<int64_t> results;  // dyn slots; -1: not looked at
  // dyn slots whose memory nothing needs after this instruction
  std::vector<int64_t> last_use;
};

// A constant computed once per loaded engine from others: weights in the layout a kernel wants.
struct Pack {
  // One run of the kernel, which writes its part of the buffer.
  struct Fill {
    int64_t constant = 0;  // what it reads
    int64_t extent = 0;
    std::vector<int64_t> ints;
  };
  std::string kernel;
  at::ScalarType dtype = at::ScalarType::Undefined;
  int64_t numel = 0;  // what no fill writes is zero
  std::vector<Fill> fills;
};

struct Program {
  std::vector<std::string> isa;
  std::vector<InputSpec> inputs;
  std::vector<Reg> regs;
  std::vector<Guard> guards;
  std::vector<Pack> packs;  // constants from num_constants on
  std::vector<Slot> slots;
  std::vector<Instr> instrs;
  std::vector<int64_t> outputs;
  // Per slot, for roots only: first and last instruction that touches its memory (-1: none;
  // the number of instructions: the caller gets it).
  std::vector<int64_t> first, last;
  // Per input: an output is a view of it, so that a contiguous copy would break the aliasing.
  std::vector<bool> aliased;
  std::vector<int64_t> updated;  // inputs that are written to, in ascending order
  // Per input: a launch reads it, so that its address has to be aligned.
  std::vector<bool> launched;
  bool draws = false;  // one of the calls does
};

// Fills in `first`, `last`, `aliased` and the instructions' `last_use`. Throws Unavailable for slots that are used in a way
// the format rules out.
void find_liveness(Program& program);

// Who wrote a program: this process, or a file, which may call no ops but those of policy.h.
enum class Origin : uint8_t { kProcess, kFile };

// Throws Unavailable for text this library cannot run.
Program parse_program(const std::string& text, size_t num_constants, Origin origin);

// Register values for inputs of these sizes; division by zero gives 0.
void eval_registers(const Program& program, const std::vector<at::Tensor>& inputs, std::vector<int64_t>& values);

// The first guard that does not hold, or nullptr.
const Guard* failed_guard(const Program& program, const std::vector<int64_t>& values);

// Everything that does not depend on sizes: count, dtype, device, rank, autograd, and unless `takes_autocast` that
// autocast is off where the inputs are.
std::optional<Code> check_inputs(const Program& program, const std::vector<at::Tensor>& inputs, bool takes_autocast);

}  // namespace blade

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
  bool number = false;  // callers give a 0-d tensor of the CPU, whose element is put on `device` in every call
};

enum class RegOp : uint8_t {
  kDim, kConst, kAdd, kSub, kMul, kFloorDiv, kMod, kMin, kMax, kEq, kNe, kLt, kLe, kGt, kGe, kAnd, kOr,
  kScale, kRoot, kLate, kIndex
};

// kDim: input a, axis b. kConst: value a. kScale: register a times factor. kRoot: the square root of
// register a, its fraction cut off. kLate: what a call makes known. kIndex: the
// iteration index of loop a. Otherwise registers a and b.
struct Reg {
  RegOp op;
  int64_t a = 0;
  int64_t b = 0;
  double factor = 0;
  uint64_t loops = 0;    // a bit per loop whose index it is computed from
  int64_t known_at = 0;  // how many instructions have to run before it is known
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
  int64_t known_at = 0;          // the largest of its registers' and its base's
  bool again = false;            // kUpdate: what is written is read by nothing before, and may be written again
  bool swapped = false;          // kArena: a loop exchanges its memory with another slot's
  uint64_t loops = 0;            // kView: a bit per loop whose index its offset, or its base's, depends on
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
  std::vector<int64_t> numbers;  // per result: the late register that it is, or -1
  int64_t stage = -1;            // which of Program::stages begins behind it, or -1
  int64_t known_at = 0;          // the largest of what it reads
  // loop: the instructions after this one are its body
  int64_t loop = -1;       // its number
  int64_t count = 0;       // a register: the trip count
  int64_t length = 0;      // instructions of the body
  std::vector<std::pair<int64_t, int64_t>> swaps;  // slots that exchange their memory after each iteration
  // dyn slots whose memory nothing needs after this instruction, for a loop: after its last iteration
  std::vector<int64_t> last_use;
};

// What the index of a loop changes, in the order in which it is computed anew.
struct LoopState {
  struct Int {
    int64_t instr, position, reg;
  };
  int64_t index = -1;  // a register
  int64_t instr = -1;
  std::vector<int64_t> regs;
  std::vector<int64_t> views;  // slots that move
  std::vector<Int> ints;       // of kernels and launches
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

// What becomes known when a call has run whose results have sizes that depend on elements.
struct Stage {
  // A size of a result, or the result itself if the axis is -1.
  struct Bound {
    int64_t reg, result, axis;
  };
  int64_t instr;
  std::vector<Bound> bound;
  std::vector<int64_t> regs, guards, slots, instrs;  // those with known_at = instr + 1, without the late registers
};

struct Program {
  std::vector<std::string> isa;
  std::vector<InputSpec> inputs;
  std::vector<Reg> regs;
  std::vector<Guard> guards;
  std::vector<Pack> packs;  // constants from num_constants on
  std::vector<Slot> slots;
  std::vector<Instr> instrs;
  std::vector<LoopState> loops;
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
  bool has_numbers = false;  // one of the inputs is
  bool has_calls = false;    // torch's own ops are among the instructions, other than assertions
  std::vector<Stage> stages;  // in the order of their calls; none: all sizes follow from the inputs'
};

// Fills in the loops' state. Throws Unavailable for loops that are not nested, and for what changes from one iteration
// to the next but may not: sizes, guards, extents.
void find_loops(Program& program);

// Fills in `first`, `last`, `aliased` and the instructions' `last_use`. Throws Unavailable for slots that are used in a way
// the format rules out.
void find_liveness(Program& program);

// Fills in `stages` and every `known_at`. Throws Unavailable for what is used before it is known.
void find_stages(Program& program);

// Who wrote a program: this process, or a file, which may call no ops but those of policy.h.
enum class Origin : uint8_t { kProcess, kFile };

// Throws Unavailable for text this library cannot run.
Program parse_program(const std::string& text, size_t num_constants, Origin origin);

// Register values for inputs of these sizes; division by zero gives 0, and the index of a loop is 0. Those that are not
// known yet are 0.
void eval_registers(const Program& program, const std::vector<at::Tensor>& inputs, std::vector<int64_t>& values);

// The value of a register that depends on others alone; the index of a loop is 0.
int64_t eval_register(const Reg& reg, const std::vector<int64_t>& values);

// The registers that follow from what `stage` binds, which `values` has.
void eval_stage(const Program& program, const Stage& stage, std::vector<int64_t>& values);

// The first guard that does not hold, or nullptr: of those on the inputs' sizes, or of a stage.
const Guard* failed_guard(const Program& program, const std::vector<int64_t>& values);
const Guard* failed_guard(const Program& program, const Stage& stage, const std::vector<int64_t>& values);

// Everything that does not depend on sizes: count, dtype, device, rank, autograd, and unless `takes_autocast` that
// autocast is off where the inputs are.
std::optional<Code> check_inputs(const Program& program, const std::vector<at::Tensor>& inputs, bool takes_autocast);

}  // namespace blade
